"""Heterogeneous DP: one group of microbatches is encoded when its first is needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.exchange import Exchange, Units
from loongplug.hetero.placement import Placement
from loongplug.hetero.timing import Arrived, EncoderOfStep, units_of
from loongplug.models.features import VisionFeatures
from loongplug.models.multimodal import MultimodalModel


@dataclass
class _Group:
    """Microbatches that the encoder's replicas encode at one time, one each."""

    first: int  # its number in the step
    units: Units
    payload: Tensor  # of this rank's unit, or of no images
    mine: int | None  # this rank's unit, counted within the group
    arrived: Arrived
    pending: int  # units whose gradients have not come


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
        self, placement: Placement, exchange: Exchange, *, group: int | None, patches_per_token: int
    ) -> None:
        """``group``: the one of the placement's groups that this rank is of, None for none."""
        self._placement = placement
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
        self._model = get_attr_wrapped_model(chunk, "image_encoder", return_model_obj=True)
        self._encoder = EncoderOfStep(chunk, self._model, training=training)
        self._microbatches = microbatches
        self._groups.clear()

    def features(self, number: int) -> VisionFeatures:
        """Encodes the microbatch's group where it is the first to ask."""
        size = len(self._placement.groups)
        if number // size not in self._groups:
            self._groups[number // size] = self._encoded(number // size * size)
        group = self._groups[number // size]
        features = group.arrived.features(number - group.first)
        assert self._encoder is not None
        if not self._encoder.trains:
            group.pending -= 1
            if group.pending == 0:
                del self._groups[number // size]
        return features

    def end(self) -> None:
        """All groups have gone backward within the schedule."""
        assert not self._groups, f"groups {sorted(self._groups)} have not gone backward"
        self._encoder = self._model = None
        self._microbatches = ()

    def _encoded(self, first: int) -> _Group:
        assert self._encoder is not None
        assert self._model is not None
        microbatches = self._microbatches[first : first + len(self._placement.groups)]
        units = units_of(microbatches, model=self._model, patches_per_token=self._block)
        mine = units.owners.index(self._mine) if self._mine in units.owners else None
        payload = self._encoder.payload(None if mine is None else microbatches[mine])
        arrived = Arrived(
            self._exchange.gather_variable_shape_embeddings(
                {} if mine is None else {mine: payload}, units
            ),
            hidden=self._model.text_decoder.config.hidden_size,
            trains=self._encoder.trains,
        )
        group = _Group(first, units, payload, mine, arrived, pending=len(microbatches))
        if self._encoder.trains:
            for leaf in arrived.leaves.values():
                leaf.register_post_accumulate_grad_hook(lambda _: self._came_back(group))
        return group

    def _came_back(self, group: _Group) -> None:
        """One of the group's units has its gradient; with the last one, all go to their owners."""
        group.pending -= 1
        if group.pending:
            return
        assert self._encoder is not None
        size = len(self._placement.groups)
        gradients = self._exchange.scatter_variable_shape_embeddings(
            group.arrived.gradients(), group.units
        )
        gradient = torch.zeros_like(group.payload)
        if group.mine is not None:
            gradient = gradients[group.mine]
        # Within the last microbatch's backward, in which Megatron lets reductions start.
        self._encoder.backward(group.payload, gradient, more=False)
        del self._groups[group.first // size]
        # A leaf's hook knows the group, and neither would ever be freed: torch does not show such
        # hooks to Python's collector.
        group.arrived.leaves.clear()
