"""What one step has made of an encoder's units on a rank, and not used up yet."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import GradientEdge

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.edge import Edges
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.encoder_state import addresses
from loongplug.hetero.exchange import Exchange, ExchangeSpec
from loongplug.hetero.operations import StepPlan
from loongplug.hetero.piece_work import PiecesOfStep
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.prefetch import Movable


@dataclass(kw_only=True)
class ExecutedStep:
    """What one step has made and not used up, by unit; ``own`` is what this rank encoded."""

    plan: StepPlan
    encoder: EncoderOfStep
    exchange: Exchange | Edges
    model: MultimodalModel
    microbatches: list[Microbatch]
    spec: ExchangeSpec  # of all units
    pieces: PiecesOfStep | None  # where it streams
    states: dict[int, Tensor] = field(default_factory=dict)  # of the stage before
    payloads: dict[int, Tensor] = field(default_factory=dict)  # encoded here, not gathered yet
    features: dict[int, Tensor] = field(default_factory=dict)  # gathered here
    taken: dict[int, Tensor] = field(default_factory=dict)  # for the forward under way
    arrived: Tensor | None = None  # the gradient that the backward under way has made
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of features
    # Roots of graphs alone: of what is encoded, features are held where they are consumed.
    own: dict[int | None, GradientEdge] = field(default_factory=dict)
    own_gradients: dict[int | None, Tensor] = field(default_factory=dict)  # of payloads
    saved: dict[int | None, list[Movable]] = field(default_factory=dict)  # that may leave

    @property
    def of_pieces(self) -> PiecesOfStep:
        """In a step that streams."""
        assert self.pieces is not None, "the step does not stream"
        return self.pieces

    @cached_property
    def weights(self) -> set[int]:
        """Addresses of what all units use."""
        return addresses(self.model.parameters())

    @cached_property
    def media(self) -> set[int]:
        """Addresses of what is encoded here."""
        units = [each.units[self.encoder.name] for each in self.microbatches]
        return addresses(each.media.rows for each in units if each.media is not None)

    def assert_done(self) -> None:
        """Behind the last operation: all that was made is used up."""
        for what in (
            *(self.payloads, self.features, self.taken, self.gradients),
            *(self.own, self.own_gradients, self.saved, self.states),
        ):
            assert not what, f"nobody used what there is of units {list(what)}"
