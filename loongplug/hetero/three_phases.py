"""Full separation: all units are encoded before the decoder's schedule and go backward after it."""

from collections.abc import Sequence

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.exchange import Exchange, Units
from loongplug.hetero.placement import Placement
from loongplug.hetero.timing import Arrived, EncoderOfStep, units_of
from loongplug.models.features import VisionFeatures
from loongplug.models.multimodal import MultimodalModel


class ThreePhases:
    """Phase 1 encodes, phase 2 is the decoder's own schedule, phase 3 is the encoder's backward.

    Section 3.3 of the LoongForge paper. Collective in phases 1 and 3: all ranks of a model
    replica, each of which has an encoder.
    """

    def __init__(
        self, placement: Placement, exchange: Exchange, *, group: int, patches_per_token: int
    ) -> None:
        """``group``: the one of the ``placement``'s groups that this rank is of."""
        self._exchange = exchange
        self._group = group
        self._block = patches_per_token
        self._encoder: EncoderOfStep | None = None
        self._units: Units | None = None
        self._payloads: dict[int, Tensor] = {}
        self._padding: Tensor | None = None
        self._arrived: Arrived | None = None

    def begin(
        self, chunk: nn.Module, microbatches: Sequence[Microbatch], *, training: bool
    ) -> None:
        """Phase 1."""
        model: MultimodalModel = get_attr_wrapped_model(
            chunk, "image_encoder", return_model_obj=True
        )
        encoder = self._encoder = EncoderOfStep(chunk, model, training=training)
        encoder.runs_apart()
        units = self._units = units_of(microbatches, model=model, patches_per_token=self._block)
        mine = [unit for unit, owner in enumerate(units.owners) if owner == self._group]
        self._payloads = {unit: encoder.payload(microbatches[unit]) for unit in mine}
        # A reduction that overlaps starts when every parameter has a gradient.
        self._padding = None if mine or not encoder.trains else encoder.payload(None)
        arrived = self._exchange.gather_variable_shape_embeddings(self._payloads, units)
        hidden = model.text_decoder.config.hidden_size
        self._arrived = Arrived(arrived, hidden=hidden, trains=encoder.trains)

    def features(self, number: int) -> VisionFeatures:
        """In phase 2."""
        assert self._arrived is not None
        return self._arrived.features(number)

    def end(self) -> None:
        """Phase 3."""
        assert self._encoder is not None
        assert self._arrived is not None
        assert self._units is not None
        if self._encoder.trains:
            gradients = self._exchange.scatter_variable_shape_embeddings(
                self._arrived.gradients(), self._units
            )
            self._arrived = None  # the features are not needed any more
            pending = [
                (self._payloads.pop(unit), gradients.pop(unit)) for unit in sorted(gradients)
            ]
            if self._padding is not None:
                pending.append((self._padding, torch.zeros_like(self._padding)))
            while pending:
                payload, gradient = pending.pop(0)
                self._encoder.backward(payload, gradient, more=bool(pending))
        self._encoder, self._arrived, self._padding = None, None, None
        self._payloads.clear()
