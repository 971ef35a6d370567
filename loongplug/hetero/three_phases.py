"""Full separation: all units are encoded before the decoder's schedule and go backward after it."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.activations import SavedOnHost
from loongplug.hetero.exchange import Exchange, ExchangeSpec
from loongplug.hetero.placement import Edge
from loongplug.hetero.store import FeatureStore, KeptOnDevice, KeptOnHost, from_store
from loongplug.hetero.timing import EncoderOfStep, units_of
from loongplug.models.features import VisionFeatures
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform import current_platform


class ThreePhases:
    """Phase 1 encodes, phase 2 is the decoder's own schedule, phase 3 is the encoder's backward.

    Section 3.3 of the LoongForge paper. Collective in phases 1 and 3: all ranks of a model
    replica, each of which has an encoder.
    """

    def __init__(
        self,
        edge: Edge,
        exchange: Exchange,
        *,
        group: int,
        patches_per_token: int,
        features_on_host: bool = False,
        activations_on_host: bool = False,
    ) -> None:
        """``group``: the ``edge``'s encoder replica that this rank is of.

        On the host, in phase 2, are features and their gradients (``features_on_host``), and
        what the encoder's backward needs (``activations_on_host``).
        """
        self._exchange = exchange
        self._group = group
        self._block = patches_per_token
        self._copies = current_platform().copies()
        self._features_on_host = features_on_host
        self._activations_on_host = activations_on_host
        self._encoder: EncoderOfStep | None = None
        self._units: ExchangeSpec | None = None
        self._hidden = 0
        self._roots: dict[int, GradientEdge] = {}  # of the graphs of the units encoded here
        self._padding: Tensor | None = None
        self._store: FeatureStore | None = None
        self._saved: SavedOnHost | None = None

    def begin(
        self, chunk: nn.Module, microbatches: Sequence[Microbatch], *, training: bool
    ) -> None:
        """Phase 1."""
        model: MultimodalModel = get_attr_wrapped_model(chunk, "encoders", return_model_obj=True)
        encoder = self._encoder = EncoderOfStep(chunk, model, training=training)
        encoder.runs_outside_schedule()
        units = self._units = units_of(microbatches, model=model, patches_per_token=self._block)
        self._hidden = model.text_decoder.config.hidden_size
        mine = [unit for unit, owner in enumerate(units.owners) if owner == self._group]
        # A reduction that overlaps starts when every parameter has a gradient.
        self._padding = None if mine or not encoder.trains else encoder.payload(None)
        # Of what is encoded here only the graphs are kept: in phase 2, features are in the store.
        self._store = self._stored(
            self._exchange.gather_variable_shape_embeddings(
                self._encoded(model, {unit: microbatches[unit] for unit in mine}), units
            )
        )

    def features(self, number: int) -> VisionFeatures:
        """In phase 2."""
        assert self._store is not None
        assert self._encoder is not None
        rows = from_store(self._store, number, trains=self._encoder.trains)
        return VisionFeatures.unpacked(rows, hidden=self._hidden)

    def end(self) -> None:
        """Phase 3."""
        assert self._encoder is not None
        assert self._store is not None
        assert self._units is not None
        if self._encoder.trains:
            gradients = self._exchange.scatter_variable_shape_embeddings(
                self._store.gradients(), self._units
            )
            self._store = None
            for unit in sorted(gradients):
                if self._saved is not None:
                    self._saved.bring(unit)
                self._encoder.backward(
                    self._roots.pop(unit), gradients.pop(unit), more=bool(gradients)
                )
            if self._padding is not None:
                self._encoder.backward(self._padding, torch.zeros_like(self._padding), more=False)
        self._encoder, self._store, self._padding, self._saved = None, None, None, None
        self._roots.clear()

    def _encoded(
        self, model: MultimodalModel, microbatches: dict[int, Microbatch]
    ) -> dict[int, Tensor]:
        """This rank's units' features; their graphs are noted."""
        encoder = self._encoder
        assert encoder is not None
        if self._activations_on_host and encoder.trains:
            self._saved = SavedOnHost(
                copies=self._copies,
                device=current_platform().device,
                stays=model.parameters(),
            )
        payloads = {}
        for unit, microbatch in microbatches.items():
            assert microbatch.vision is not None, "the unit was loaded somewhere else"
            stays = (microbatch.vision.pixels,)
            with nullcontext() if self._saved is None else self._saved.of_unit(unit, stays=stays):
                payloads[unit] = encoder.payload(microbatch)
        if self._saved is not None:
            self._saved.left()
        if encoder.trains:
            self._roots = {unit: get_gradient_edge(each) for unit, each in payloads.items()}
        return payloads

    def _stored(self, features: dict[int, Tensor]) -> FeatureStore:
        if not self._features_on_host:
            return KeptOnDevice(features)
        return KeptOnHost(features, copies=self._copies, device=current_platform().device)
