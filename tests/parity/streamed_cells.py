"""The parity matrix's cells whose encoders fill the pipeline's bubbles. Pure, always the same."""

from dataclasses import dataclass, replace
from itertools import product

from parity.cells import (
    FULL,
    HEARING_MODELS,
    MODELS,
    MORE_MODELS,
    Cell,
    few_of,
    layouts,
    one_of_each,
    sequence_parallel_choices,
)
from parity.saving_cells import AWAY, TrainedCell, one_word

# By the model's encoders: what is frozen or adapted is that of images, if there is one.
_TRAINED = {
    ("image_encoder",): ("all", "all but the encoder", "the decoder", "LoRA of all modules"),
    ("image_encoder", "audio_encoder"): ("all", "all but the encoder"),
    ("audio_encoder",): ("all",),
}
# Adam makes as large a step of a gradient near zero as of any other. Where few tokens reach an
# expert, some gradients of its adapters are rounding alone: another one, where an encoder's passes
# have other units in them. In 16 layers a second step then differs by 8e-5, and by 5e-6 with this.
_SMALLEST = ("--adam-eps", "1e-3")
_AWAY = ("nothing", "activations")


@dataclass(frozen=True, kw_only=True, order=True)
class StreamedCell(TrainedCell):
    """One layout of full separation, streamed."""

    schedule: str = "streamed"
    away: str = "nothing"

    @property
    def streams(self) -> bool:
        """Whether its encoders work in the pipeline's bubbles."""
        return True

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        return f"{super().name}-{self.schedule}-{one_word(self.trained)}-away-{self.away}"

    @property
    def _adapts(self) -> bool:
        return "LoRA" in self.trained

    @property
    def reference(self) -> str:
        """Names the single rank's run, in which the same trains, as fast."""
        return f"{super().reference}{'-steady' if self._adapts else ''}"

    def shared_flags(self) -> list[str]:
        """What the single rank is given, too."""
        return [*super().shared_flags(), *(_SMALLEST if self._adapts else ())]

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        return [*super().flags(), *AWAY[self.away]]


def streamed_cells() -> list[StreamedCell]:
    """Every layout of full separation that can stream, in one choice of the options or more.

    Of other models, cells until every value of an axis was in one.
    """
    of_many = [
        cell
        for model in MODELS
        for cell in one_of_each([_choices(each) for each in streamed_layouts(model)], seed=model)
    ]
    return of_many + [
        cell
        for model in (*MORE_MODELS, *HEARING_MODELS)
        for cell in few_of(
            [cell for each in streamed_layouts(model) for cell in _choices(each)], seed=model
        )
    ]


def streamed_layouts(model: str) -> list[Cell]:
    """There are stages, and each has whole replicas of the encoder."""
    return [
        each
        for each in layouts(model)
        if each.mode == FULL and each.pp > 1 and each.encoder_tp <= each.tp
    ]


def _choices(layout: Cell) -> list[StreamedCell]:
    """The layout with every choice of the options that it can have; balance is the plan's own."""
    bare = StreamedCell(**vars(layout))
    return [
        replace(
            bare,
            sequence_parallel=sequence,
            recompute=recompute,
            optimizer=optimizer,
            trained=trained,
            away=away,
        )
        for sequence, recompute, optimizer, trained, away in product(
            sequence_parallel_choices(layout),
            ("none", "both"),
            ("plain", "overlapped"),
            _TRAINED[layout.encoders],
            _AWAY,
        )
    ]
