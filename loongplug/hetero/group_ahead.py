"""Heterogeneous DP: one group of microbatches is encoded when its first is needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.exchange import Exchange, ExchangeSpec
from loongplug.hetero.placement import Edge
from loongplug.hetero.store import KeptOnDevice, from_store
from loongplug.hetero.timing import EncoderOfStep, units_of
from loongplug.models.features import VisionFeatures
from loongplug.models.multimodal import MultimodalModel


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """Autograd root of this rank's encoded microbatch, kept until its feature gradient arrives.

    ``root`` is None where nothing trains.
    """

    unit: int | None  # counted within the group
    root: GradientEdge | None
    no_rows: Tensor  # [0, width]


class _Group(KeptOnDevice):
    """Microbatches that the encoder's replicas encode at one time, one each: their features."""

    def __init__(
        self,
        features: dict[int, Tensor],
        *,
        first: int,
        units: ExchangeSpec,
        own: _Encoded,
        on_all_gradients: Callable[["_Group"], None],
    ) -> None:
        """``first``: its number in the step. ``on_all_gradients`` is called with the last."""
        super().__init__(features)
        self.first = first
        self.units = units
        self.own = own
        self.pending = len(units.owners)  # whose gradients have not come
        self._on_all_gradients = on_all_gradients

    def keep_gradient(self, unit: int, gradient: Tensor) -> None:
        """Keep it as it is, or send it on with all others."""
        super().keep_gradient(unit, gradient)
        self.pending -= 1
        if self.pending == 0:
            self._on_all_gradients(self)


class GroupAhead:
    """The replicas in a tensor parallel group encode as many microbatches at a time as they are.

    When the decoder's first stage comes to the first microbatch of a group, each replica encodes
    its own of them and all features go to the whole group; when the decoder has gone backward
    through the last of them, the gradients go to the units' owners and they go backward. Section
    3.2 of the LoongForge paper, with encoders of any tensor parallel size.

    Collective in :meth:`features` and within backward: the first stage's tensor parallel group,
    whose ranks run the same schedule. Later stages have nothing to do.
    """

    def __init__(
        self, edge: Edge, exchange: Exchange, *, group: int | None, patches_per_token: int
    ) -> None:
        """``group``: the edge's encoder replica that this rank is of, None for none."""
        self._edge = edge
        self._exchange = exchange
        self._mine = group
        self._block = patches_per_token
        self._encoder: EncoderOfStep | None = None
        self._model: MultimodalModel | None = None
        self._microbatches: Sequence[Microbatch] = ()
        self._groups: dict[int, _Group] = {}

    def begin(
        self, chunk: nn.Module, microbatches: Sequence[Microbatch], *, training: bool
    ) -> None:
        """Only notes what will be needed."""
        if self._mine is None:
            return
        self._model = get_attr_wrapped_model(chunk, "encoders", return_model_obj=True)
        self._encoder = EncoderOfStep(chunk, self._model, training=training)
        self._microbatches = microbatches
        self._groups.clear()

    def features(self, number: int) -> VisionFeatures:
        """Encodes the microbatch's group where it is the first to ask."""
        size = len(self._edge.replicas)
        if number // size not in self._groups:
            self._groups[number // size] = self._encoded(number // size * size)
        group = self._groups[number // size]
        assert self._encoder is not None
        assert self._model is not None
        rows = from_store(group, number - group.first, trains=self._encoder.trains)
        if not self._encoder.trains:
            group.pending -= 1
            if group.pending == 0:
                del self._groups[number // size]
        return VisionFeatures.unpacked(rows, hidden=self._model.text_decoder.config.hidden_size)

    def end(self) -> None:
        """All groups have gone backward within the schedule."""
        assert not self._groups, f"groups {sorted(self._groups)} have not gone backward"
        self._encoder = self._model = None
        self._microbatches = ()

    def _encoded(self, first: int) -> _Group:
        assert self._encoder is not None
        assert self._model is not None
        microbatches = self._microbatches[first : first + len(self._edge.replicas)]
        units = units_of(microbatches, model=self._model, patches_per_token=self._block)
        mine = units.owners.index(self._mine) if self._mine in units.owners else None
        payload = self._encoder.payload(None if mine is None else microbatches[mine])
        own = _Encoded(
            unit=mine,
            root=get_gradient_edge(payload) if self._encoder.trains else None,
            no_rows=payload.new_zeros(0, units.width),
        )
        arrived = self._exchange.gather_variable_shape_embeddings(
            {} if mine is None else {mine: payload}, units
        )
        return _Group(
            arrived, first=first, units=units, own=own, on_all_gradients=self._on_all_gradients
        )

    def _on_all_gradients(self, group: _Group) -> None:
        """All of a group's units have their gradients, which go to their owners."""
        assert self._encoder is not None
        size = len(self._edge.replicas)
        gradients = self._exchange.scatter_variable_shape_embeddings(group.gradients(), group.units)
        own = group.own
        assert own.root is not None
        gradient = own.no_rows if own.unit is None else gradients[own.unit]
        # Within the last microbatch's backward, in which Megatron lets reductions start.
        self._encoder.backward(own.root, gradient, more=False)
        del self._groups[group.first // size]
