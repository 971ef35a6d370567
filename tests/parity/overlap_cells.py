"""The parity matrix's cells with the experts' exchange overlapped. Pure and the same every time."""

from dataclasses import dataclass, replace
from itertools import product

from loongplug.schedule.tensor_names import RECOMPUTED
from parity.cells import (
    ENCODER_DP,
    FULL,
    OPTIMIZERS,
    UNIFORM,
    one_of_each,
    sequence_parallel_choices,
)
from parity.saving_cells import TrainedCell, one_word

_MODEL = "qwen3_vl_moe_tiny"
# Mode, encoder TP, TP: uniform, heterogeneous TP and DP, full separation.
_MODES = (
    *((UNIFORM, 1, 1), (UNIFORM, 2, 2), (UNIFORM, 1, 2), (ENCODER_DP, 1, 2)),
    *((FULL, 1, 1), (FULL, 1, 2), (FULL, 2, 2)),
)
_PIPELINES = ((1, 1), (2, 2))  # PP, VPP: Megatron's schedule takes no stages without virtual ones
_EP = (2, 4)
_TRAINED = ("all", "all but the encoder", "decoder's LoRA")
_NODES = ("--recompute-granularity", "selective", "--recompute-modules", *RECOMPUTED)
_TENSORS = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "0"),
    *("--offload-tensors", "dispatched_input", "pre_mlp_layernorm_input"),
    *("pre_mlp_layernorm_output", "fc1_output"),
)
_SHARED_EXPERTS = "foundation.shared_expert_ffn_hidden_size"
# What is kept of a layer's activations, by the flags for it.
KEPT: dict[str, tuple[str, ...]] = {
    "all": (),
    "nodes recomputed": _NODES,
    "tensors away": _TENSORS,
    "both": (*_NODES, *_TENSORS),
}


@dataclass(frozen=True, kw_only=True, order=True)
class OverlapCell(TrainedCell):
    """One layout with the overlap on.

    It is held against the single rank in fp32, and in bf16, bit by bit, against the same layout
    with neither the overlap nor what goes with it.
    """

    kept: str = "all"
    delayed: bool = False
    shared_experts: bool = False

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        marks = [super().name, "overlap", one_word(self.trained), f"kept-{one_word(self.kept)}"]
        marks += ["delayed"] if self.delayed else []
        return "-".join([*marks, *(["shared-experts"] if self.shared_experts else [])])

    @property
    def weights(self) -> str:
        """Names the model that it trains, and its weights."""
        return f"{super().weights}{'-shared-experts' if self.shared_experts else ''}"

    def sizes(self) -> dict[str, object]:
        """What of the model's small likeness is the cell's, by keys below ``model``."""
        shared = {_SHARED_EXPERTS: 32} if self.shared_experts else {}
        return super().sizes() | shared

    @property
    def decoder_ranks(self) -> int:
        """All of them: none is an encoder's alone."""
        return self.ranks

    def twin_flags(self) -> list[str]:
        """The same layout without the overlap."""
        return super().flags()

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        delayed = ["--delay-wgrad-compute"] if self.delayed else []
        return [
            *self.twin_flags(),
            "--overlap-moe-expert-parallel-comm",
            *KEPT[self.kept],
            *delayed,
        ]


def overlap_cells() -> list[OverlapCell]:
    """Every layout of every mode, and more until every two values of two axes have met."""
    return one_of_each([_choices(layout) for layout in overlap_layouts()], seed=_MODEL)


def overlap_layouts() -> list[OverlapCell]:
    """Each on as few ranks as it takes."""
    return [
        OverlapCell(
            model=_MODEL,
            mode=mode,
            encoder_tp=encoder_tp,
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=ep // tp,
            ep=ep,
        )
        for (mode, encoder_tp, tp), (pp, vpp), ep in product(_MODES, _PIPELINES, _EP)
    ]


def _choices(layout: OverlapCell) -> list[OverlapCell]:
    """The layout with every choice of the options that it can have."""
    return [
        replace(
            layout,
            sequence_parallel=sequence,
            recompute=recompute,
            optimizer=optimizer,
            balance=balance,
            trained=trained,
            kept=kept,
            delayed=delayed,
            shared_experts=shared,
        )
        for sequence, recompute, optimizer, balance, trained, kept, delayed, shared in product(
            sequence_parallel_choices(layout),
            ("none", "encoder"),
            OPTIMIZERS,
            (False, True) if layout.can_balance else (False,),
            _TRAINED,
            KEPT,
            (False, True),
            (False, True),
        )
    ]
