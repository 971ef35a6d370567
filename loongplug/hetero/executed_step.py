"""What one step has made of an encoder's pieces on a rank, and not used up yet."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import GradientEdge

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.hetero.carrier import Carrier
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.encoder_state import addresses
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import StepPlan
from loongplug.hetero.piece_work import PiecesOfStep
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.prefetch import Movable


@dataclass(kw_only=True)
class ExecutedStep:
    """What one step has made and not used up, by piece; ``own`` is what this rank encoded."""

    plan: StepPlan
    encoder: EncoderOfStep
    model: MultimodalModel
    microbatches: list[Microbatch]
    spec: ExchangeSpec  # of all that is exchanged
    pieces: PiecesOfStep | None  # where it streams
    carrier: Carrier | None = None  # where pieces go from rank to rank
    states: dict[int, Tensor] = field(default_factory=dict)  # of the stage before
    payloads: dict[int, Tensor] = field(default_factory=dict)  # encoded here, not gathered yet
    features: dict[int, Tensor] = field(default_factory=dict)  # gathered here
    taken: dict[int, Tensor] = field(default_factory=dict)  # for a microbatch's forward under way
    arrived: Tensor | None = None  # the gradient that the backward under way has made
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of features
    # Roots of graphs alone: of what is encoded, features are held where they are consumed.
    own: dict[tuple[int, ...], GradientEdge] = field(default_factory=dict)  # by pass
    own_gradients: dict[int | None, Tensor] = field(default_factory=dict)  # None: of no media
    saved: dict[int, list[Movable]] = field(default_factory=dict)  # that may leave, by pass

    def unit(self, piece: int) -> Unit:
        """The media of a piece that is encoded here."""
        if self.pieces is not None:
            return self.pieces.unit(piece)
        return self.microbatches[piece].units[self.encoder.name]

    def pieces_of(self, microbatch: int) -> range:
        """Those that a microbatch consists of."""
        if self.pieces is not None:
            return self.pieces.stream.pieces[microbatch]
        return range(microbatch, microbatch + 1)

    @cached_property
    def weights(self) -> set[int]:
        """Addresses of what all pieces use."""
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
            assert not what, f"nobody used what there is of pieces {list(what)}"
