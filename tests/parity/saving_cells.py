"""The parity matrix's other cells: where not everything trains, or not everything stays.

Pure and the same every time. Layouts are small ones, since every one of them is run with everything
trained already; over all cells of a model, every two values of two axes meet somewhere.
"""

from dataclasses import dataclass, replace
from itertools import product

from loongplug.models.architecture import VisionLanguageArchitecture
from parity.cells import (
    FULL,
    MODELS,
    MODES,
    MOST_RANKS,
    Cell,
    covering,
    sequence_parallel_choices,
)

_SIZES = (1, 2)
_ENCODER_SIZES = (1, 2, 4)  # four are two stages of TP 2
_CANDIDATES = 400  # that are looked at for the next cell

_ENCODER, _PROJECTOR, _DECODER = (
    f"model.{module}.freeze=true" for module in VisionLanguageArchitecture.keys.values()
)
# Adapters start at random values as large as the weights'. Counted in full, they make a model whose
# gradients hang on the last bit of everything in front of them.
_LORA = ("+model.foundation.lora.rank=4", "+model.foundation.lora.alpha=1")
# What trains, by what is given for it: to the layout and to the single rank.
TRAINED: dict[str, tuple[str, ...]] = {
    "all": (),
    "all but the encoder": (_ENCODER,),
    "the decoder": (_ENCODER, _PROJECTOR),
    "all but the decoder": (_DECODER,),
    "norms, biases, last layer": (
        *("--freeze-parameters", "*", "--train-parameters"),
        *("*norm*", "*.bias", "text_decoder.decoder.layers.3.*"),
    ),
    "decoder's LoRA": (_ENCODER, _PROJECTOR, *_LORA),
    "LoRA of all modules": (
        *_LORA,
        *("+model.image_encoder.lora.rank=3", "+model.image_encoder.lora.alpha=1"),
        *("+model.image_projector.lora.rank=2", "+model.image_projector.lora.alpha=0.5"),
    ),
}
# What leaves the device in phase 2, by the flags for it.
AWAY: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "features": ("--full-hetero-dp-cpu-offload",),
    "activations": ("--offload-encoder-activations",),
    "state": ("--offload-encoder-state",),
}
AWAY["all three"] = tuple(flag for flags in AWAY.values() for flag in flags)


@dataclass(frozen=True, kw_only=True, order=True)
class TrainedCell(Cell):
    """One run in which not everything may train."""

    trained: str = "all"

    @property
    def reference(self) -> str:
        """Names the single rank's run, in which the same trains."""
        return f"{self.weights}-{one_word(self.trained)}"

    def shared_flags(self) -> list[str]:
        """What the single rank is given, too."""
        return list(TRAINED[self.trained])


@dataclass(frozen=True, kw_only=True, order=True)
class SavingCell(TrainedCell):
    """One run in which something is frozen, adapted or away."""

    away: str = "nothing"

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        return f"{super().name}-{one_word(self.trained)}-away-{one_word(self.away)}"

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        return [*super().flags(), *AWAY[self.away]]


def one_word(words: str) -> str:
    """Words that a name can have in it.

    >>> one_word("norms, biases, last layer")
    'norms-biases-last-layer'
    """
    return "-".join(words.replace(",", "").replace("'s", "").split())


def saving_cells() -> list[SavingCell]:
    """All of them."""
    return [
        cell
        for model in MODELS
        for cell in covering(possible_cells(model), seed=model, candidates=_CANDIDATES)
    ]


def possible_cells(model: str) -> list[SavingCell]:
    """Every layout with every choice of the options that it can have, but those that save nothing.

    Recompute and optimizers are all or nothing here: what lies between is the layouts' matrix.
    """
    return [
        replace(
            layout,
            sequence_parallel=sequence,
            recompute=recompute,
            tied=tied,
            optimizer=optimizer,
            balance=balance,
            trained=trained,
            away=away,
        )
        for layout in _layouts(model)
        for sequence, recompute, tied, optimizer, balance, trained, away in product(
            sequence_parallel_choices(layout),
            ("none", "both"),
            (False, True),
            ("plain", "overlapped"),
            (False, True) if layout.can_balance else (False,),
            TRAINED,
            AWAY if layout.mode == FULL else ("nothing",),
        )
        if (trained, away) != ("all", "nothing")
    ]


def _layouts(model: str) -> list[SavingCell]:
    cells = (
        SavingCell(
            model=model, mode=mode, encoder_tp=encoder_tp, tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep
        )
        for mode in MODES
        for tp, pp, vpp, dp, ep in product(_SIZES, repeat=5)
        for encoder_tp in _ENCODER_SIZES
    )
    return [cell for cell in cells if cell.possible and 1 < cell.ranks <= MOST_RANKS]
