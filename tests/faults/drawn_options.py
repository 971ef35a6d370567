"""What fuzzed runs choose from: models, layouts, modes, what trains, and what leaves losses be."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

MODELS = {
    "dense": "qwen3_vl_tiny",
    "experts": "qwen3_vl_moe_tiny",
    "one size": "llava_tiny",
    "tiles": "internvl_tiny",
    "two encoders": "qwen2_5_omni_tiny",
}
ROWS = ("text", "mixed", "many", "lone")  # how many images rows have
DAMAGES = ("pixels", "media", "row")  # of one row, which the third step meets


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of the decoder; data parallel is what is left of ``ranks``.

    ``own`` are TP/PP/DP of encoders on ranks of their own, which are the last of ``ranks``.
    ``comm`` is how keys come to the ``cp`` ranks of a row, "" where nothing is given.
    """

    ranks: int = 1
    own: str = ""
    tp: int = 1
    cp: int = 1
    comm: str = ""
    pp: int = 1
    vpp: int = 1
    ep: int = 1

    @property
    def encoders(self) -> tuple[tuple[int, int, int], ...]:
        """TP, PP and DP of those on ranks of their own."""
        sizes = (each.split("/") for each in self.own.split("|") if each)
        return tuple((int(tp), int(pp), int(dp)) for tp, pp, dp in sizes)

    @property
    def decoder_ranks(self) -> int:
        """The first of all, which the decoder has."""
        return self.ranks - sum(map(prod, self.encoders))

    def flags(self) -> list[str]:
        """As the command line has them. Experts that are dealt out are not split as well."""
        flags = []
        if self.tp > 1:
            flags += ["--tensor-model-parallel-size", str(self.tp)]
        if self.cp > 1:
            flags += ["--context-parallel-size", str(self.cp)]
        if self.comm:
            flags += ["--cp-comm-type", self.comm]
        if self.pp > 1:
            flags += ["--pipeline-model-parallel-size", str(self.pp)]
        if self.vpp > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.ep > 1:
            flags += ["--expert-model-parallel-size", str(self.ep)]
            flags += ["--expert-tensor-parallel-size", "1"]
        return flags


ALONE = Layout()
# By the number of ranks. Most draws have one or two: a draw costs what its ranks cost.
LAYOUTS = {
    1: (ALONE,),
    2: (
        Layout(ranks=2),
        Layout(ranks=2, tp=2),
        Layout(ranks=2, tp=2),  # it has the most modes
        Layout(ranks=2, cp=2),
        Layout(ranks=2, pp=2),
        Layout(ranks=2, pp=2, vpp=2),
        Layout(ranks=2, ep=2),
        Layout(ranks=2, tp=2, ep=2),
    ),
    3: (Layout(ranks=3, cp=3),),
    4: (
        Layout(ranks=4, tp=2),
        Layout(ranks=4, pp=2),
        Layout(ranks=4, tp=2, cp=2),
        Layout(ranks=4, cp=2, pp=2),
        Layout(ranks=4, tp=2, pp=2),
        Layout(ranks=4, tp=2, pp=2, vpp=2),
        Layout(ranks=4, tp=4),
        Layout(ranks=4, pp=4),
        Layout(ranks=4, ep=4),
        Layout(ranks=4, pp=2, ep=2),
        Layout(ranks=4, tp=2, ep=2),
    ),
}


def layouts_of(model: str, ranks: int) -> tuple[Layout, ...]:
    """Those of so many ranks that a model can have; experts most often in parallel."""
    if model != "experts":
        return tuple(layout for layout in LAYOUTS[ranks] if layout.ep == 1)
    return LAYOUTS[ranks] + tuple(layout for layout in LAYOUTS[ranks] if layout.ep > 1)


def comm_types(layout: Layout) -> tuple[str, ...]:
    """Ways in which keys can come to a row's ranks; a2a deals out the four heads that have some."""
    if layout.cp == 1:
        return ("",)
    whole = 4 // layout.tp % layout.cp == 0
    return ("", "a2a", "p2p") if whole else ("", "p2p")


def packed_flags(layout: Layout) -> tuple[str, ...]:
    """Of rows that are packs. Their samples say who holds what, but where keys go round."""
    lpt = layout.cp > 1 and layout.comm != "p2p"
    return ("--packing", "--micro-batch-size", "1", *(("--cp-balance", "lpt") if lpt else ()))


# By the number of ranks, with encoders on ranks of their own.
OWN_LAYOUTS = {
    2: (Layout(ranks=2, own="1/1/1"),),
    3: (
        Layout(ranks=3, own="1/1/1"),
        Layout(ranks=3, own="1/1/2"),
        Layout(ranks=3, own="2/1/1"),
        Layout(ranks=3, own="1/2/1"),
        Layout(ranks=3, own="1/1/1", tp=2),
        Layout(ranks=3, own="1/1/1", cp=2),
        Layout(ranks=3, own="1/1/1", pp=2),
        Layout(ranks=3, own="1/1/1", pp=2, vpp=2),
        Layout(ranks=3, own="1/1/1", ep=2),
    ),
    4: (
        Layout(ranks=4, own="1/1/3"),
        Layout(ranks=4, own="1/1/2"),
        Layout(ranks=4, own="1/1/2", tp=2),
        Layout(ranks=4, own="1/1/2", cp=2),
        Layout(ranks=4, own="2/1/1", cp=2),
        Layout(ranks=4, own="1/1/1", cp=3),
        Layout(ranks=4, own="2/1/1", pp=2),
        Layout(ranks=4, own="1/2/1", pp=2),
        Layout(ranks=4, own="1/1/2", pp=2, vpp=2),
        Layout(ranks=4, own="2/1/1", tp=2, ep=2),
    ),
    6: (
        Layout(ranks=6, own="1/1/2", tp=2, pp=2),
        Layout(ranks=6, own="1/1/2", cp=2, pp=2),
        Layout(ranks=6, own="2/1/1", pp=2, vpp=2),
        Layout(ranks=6, own="1/1/4"),
    ),
}
# More of a model with two encoders, of which the second lies with the decoder in those above.
OWN_LAYOUTS_OF_TWO = {
    3: (Layout(ranks=3, own="1/1/1|1/1/1"),),
    4: (
        Layout(ranks=4, own="1/1/1|1/1/1"),
        Layout(ranks=4, own="1/1/1|1/1/2"),
        Layout(ranks=4, own="1/1/1|1/1/1", pp=2),
        Layout(ranks=4, own="1/1/1|1/1/1", tp=2),
        Layout(ranks=4, own="1/1/1|1/1/1", cp=2),
    ),
    6: (
        Layout(ranks=6, own="1/1/1|1/1/1", pp=2, vpp=2),
        Layout(ranks=6, own="1/2/1|1/1/1", pp=3),
    ),
}


def own_layouts_of(model: str, *, large: bool) -> tuple[Layout, ...]:
    """Those with encoders on ranks of their own that a model can have."""
    tables = [OWN_LAYOUTS_OF_TWO] if model == "two encoders" else []
    sizes = [ranks for table in (*tables, OWN_LAYOUTS) for ranks in table.items()]
    found = [each for ranks, some in sizes if ranks <= 4 or large for each in some]
    return tuple(each for each in found if model == "experts" or each.ep == 1)


MODES = (
    *("uniform", "hetero-tp", "hetero-dp"),
    *("full", "full-balanced", "full-wide", "full-streamed", "apart"),
)


def modes_of(layout: Layout) -> tuple[str, ...]:
    """Those that a layout can have."""
    if layout.own:
        return ("apart",)
    needs = {
        "apart": False,
        "hetero-tp": layout.tp > 1,
        "hetero-dp": layout.tp * layout.cp > 1,
        "full-wide": layout.pp > 1,
        "full-streamed": layout.pp > 1,
    }
    return tuple(mode for mode in MODES if needs.get(mode, True))


def is_full(mode: str) -> bool:
    """Whether encoder and decoder take turns, the encoder on all ranks."""
    return mode.startswith("full")


def mode_flags(mode: str, layout: Layout) -> tuple[str, ...]:
    """As the command line has them. In full-wide an encoder is split over all stages.

    What cannot stream (encoders of two modes, features on the host) does not in full-streamed.
    """
    own_tp = "model.image_encoder.tensor_model_parallel_size"
    full = ("--enable-full-hetero-dp",)
    return {
        "uniform": (),
        "hetero-tp": (f"{own_tp}=1",),
        "hetero-dp": ("--enable-encoder-hetero-dp",),
        "full": (*full, "--full-hetero-dp-schedule", "separated"),
        "full-balanced": (
            *(*full, "--use-vit-dp-balance"),
            *("--dp-balance-trigger-threshold-vit", "0"),
        ),
        "full-streamed": (*full, "--full-hetero-dp-schedule", "auto"),
        "full-wide": (*full, f"{own_tp}={layout.tp * layout.cp * layout.pp}"),
        "apart": tuple(_apart_flags(layout)),
    }[mode]


def _apart_flags(layout: Layout) -> Iterator[str]:
    offset = layout.decoder_ranks
    for key, (tp, pp, dp) in zip(("image_encoder", "audio_encoder"), layout.encoders, strict=False):
        yield f"model.{key}.rank_offset={offset}"
        yield f"model.{key}.tensor_model_parallel_size={tp}"
        yield f"model.{key}.pipeline_model_parallel_size={pp}"
        yield f"model.{key}.data_parallel_size={dp}"
        offset += tp * pp * dp


_FROZEN_ENCODER = "model.image_encoder.freeze=True"
_FROZEN_PROJECTOR = "model.image_projector.freeze=True"
_FROZEN_DECODER = "model.foundation.freeze=True"


def _adapters(*modules: str) -> tuple[str, ...]:
    """Modules whose adapters train, and nothing else of them."""
    return tuple(
        f"+model.{module}.lora.{key}" for module in modules for key in ("rank=2", "alpha=8")
    )


# What trains.
TRAINS: dict[str, tuple[str, ...]] = {
    "everything": (),
    "projector and decoder": (_FROZEN_ENCODER,),
    "decoder": (_FROZEN_ENCODER, _FROZEN_PROJECTOR),
    "encoder and projector": (_FROZEN_DECODER,),
    "projector": (_FROZEN_ENCODER, _FROZEN_DECODER),
    "all but patterns": (
        *("--freeze-parameters", "*norm*", "*.bias", "image_encoder.blocks.layers.0.*"),
        "text_decoder.decoder.layers.[12].*",
    ),
    "patterns": (
        *("--freeze-parameters", "*"),
        *("--train-parameters", "*norm*", "image_projector.*", "text_decoder.decoder.layers.2.*"),
    ),
    "decoder's adapters": (_FROZEN_ENCODER, _FROZEN_PROJECTOR, *_adapters("foundation")),
    "vision's adapters and decoder": _adapters("image_encoder", "image_projector"),
    "all adapters": _adapters("image_encoder", "image_projector", "foundation"),
}
# What most runs train. The others meet fewer kinds of data: each pair takes a run without faults.
COMMON = ("everything", "projector and decoder", "decoder")
# What learns from images alone.
VISION = ("encoder and projector", "projector")


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Flags that leave a run's losses as they are; in one of ``odds`` runs that can have them."""

    flags: tuple[str, ...]
    odds: int
    needs: str = ""  # ranks, tp, full: more than one rank, TP above 1, full separation
    brings: tuple[str, ...] = ()  # other extras that it takes


EXTRAS: dict[str, Extra] = {
    "distributed optimizer": Extra(flags=("--use-distributed-optimizer",), odds=2),
    "overlap": Extra(flags=("--overlap-grad-reduce",), odds=2, needs="ranks"),
    "gather ahead": Extra(
        flags=("--overlap-param-gather",),
        odds=4,
        needs="ranks",
        brings=("distributed optimizer", "overlap"),
    ),
    "async save": Extra(flags=("--async-save",), odds=5),
    "sequence parallel": Extra(flags=("--sequence-parallel",), odds=3, needs="tp"),
    "features away": Extra(flags=("--full-hetero-dp-cpu-offload",), odds=3, needs="full"),
    "activations away": Extra(flags=("--offload-encoder-activations",), odds=4, needs="full"),
    "state away": Extra(flags=("--offload-encoder-state",), odds=3, needs="full"),
    "encoder recomputed": Extra(flags=("model.image_encoder.recompute=True",), odds=8),
    "decoder recomputed": Extra(
        flags=(
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
        ),
        odds=8,
    ),
}


def can_have(extra: str, layout: Layout, mode: str) -> bool:
    """Whether a run can have it."""
    needs = EXTRAS[extra].needs
    able = {"ranks": layout.ranks > 1, "tp": layout.tp > 1, "full": is_full(mode)}
    return able.get(needs, True)


def extra_flags(extras: tuple[str, ...], *, model: str, layout: Layout, mode: str) -> list[str]:
    """Flags of those ``extras`` that this run can have, without repeats, in order."""
    names = [name for name in extras if can_have(name, layout, mode)]
    if model == "experts" and layout.tp > 1:  # a rule asks for it
        names.append("sequence parallel")
    flags = list(dict.fromkeys(flag for name in names for flag in EXTRAS[name].flags))
    # One encoder in the run's mode, and one that is not.
    mixed = model == "two encoders" and layout.ranks > 1 and len(extras) % 2 == 1
    return [*flags, *(["model.audio_encoder.mode=uniform"] if mixed and not layout.own else [])]
