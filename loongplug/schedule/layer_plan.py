"""A decoder layer's schedule nodes: Megatron's, with what these layers add to a plain one."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from loongplug.models.features import DeepstackTransformerLayer, add_next_feature, take_features
from loongplug.models.layers.linear import DelayedGradient
from loongplug.models.layers.mlp import ExpertLayer
from loongplug.schedule.node_recompute import (
    ATTENTION,
    EXPERTS,
    POST_ATTENTION,
    recomputed_before_dispatch,
    recomputed_experts,
)
from loongplug.schedule.tensor_offload import LayerTensors

# A node's function: the node, then what the node before it gave.
Submodule = Callable[..., Any]


class LayerPlan(TransformerLayerSchedulePlan):
    """One microbatch's way through one layer of experts, in nodes that the schedule can order.

    Deepstack features come stacked with the hidden states (:mod:`loongplug.models.features`). The
    layer's first node takes them off and its last node adds the layer's own; between the two they
    wait in the layer's state, as the residual does, and their gradients go back the same way.
    """

    def _build_callable_nodes(
        self, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]
    ) -> None:
        tensors: LayerTensors | None = extra_args.pop("tensors")
        super()._build_callable_nodes(event, comp_stream, comm_stream, extra_args)
        layer = self.layer
        assert isinstance(layer.mlp, ExpertLayer), "every layer has experts"
        first, last = self.pre_dispatch_computation, self.moe_combine
        parts = layer.config.recompute_nodes
        if ATTENTION in parts or POST_ATTENTION in parts:
            first.submodule = recomputed_before_dispatch(layer, parts)
        else:
            first.submodule = _with_token_kinds(first.submodule, layer.mlp)
        if EXPERTS in parts:
            self.mlp.submodule = recomputed_experts(layer)
            self.mlp.free_input = False  # they are computed of it once more
        travelling = layer.travelling if isinstance(layer, DeepstackTransformerLayer) else 0
        if travelling:
            first.submodule = _taking_features(first.submodule, travelling)
            last.submodule = _adding_feature(last.submodule)
        if layer.config.sequence_parallel:
            for node in (first, last):
                node.submodule = _drawing_apart(node.submodule)
        if tensors is not None:
            for node in (first, self.moe_dispatch, self.mlp, last):
                node.submodule = _within(tensors, node.submodule, ends=node is last)
            if EXPERTS in parts:
                self.mlp.submodule = _naming_input(tensors, self.mlp.submodule)

    def release_state(self) -> None:
        """The microbatch is through: forward, backward and the gradients of weights."""
        if self.layer.config.delay_wgrad_compute:
            waiting = [
                name
                for name, module in self.layer.named_modules()
                if isinstance(module, DelayedGradient) and module.waits
            ]
            assert not waiting, f"nobody asked for the weights' gradients of {', '.join(waiting)}"
        super().release_state()


def _within(tensors: LayerTensors, inner: Submodule, *, ends: bool) -> Submodule:
    """The layer's forward goes on, or ``ends``."""

    def part(node: Any, *inputs: Tensor) -> Any:
        with tensors.forward():
            output = inner(node, *inputs)
        if ends:
            tensors.forward_done()
        return output

    return part


def _drawing_apart(inner: Submodule) -> Submodule:
    """Dropout differs between parts of a sequence: Megatron's decoder says so to all its layers."""

    def part(node: Any, *inputs: Tensor) -> Any:
        with get_cuda_rng_tracker().fork():
            return inner(node, *inputs)

    return part


def _naming_input(tensors: LayerTensors, inner: Submodule) -> Submodule:
    """What the experts are computed of twice is what dispatch gave, in its order."""

    def experts(node: Any, dispatched: Tensor) -> Any:
        tensors.passes("dispatched_input", dispatched)
        return inner(node, dispatched)

    return experts


def _with_token_kinds(inner: Submodule, experts: ExpertLayer) -> Submodule:
    """Routers are told which tokens are padding and which count, as in the layer's forward."""

    def pre_dispatch(node: Any, hidden_states: Tensor) -> Any:
        experts.token_kinds = node.chunk_state.padding_mask
        try:
            return inner(node, hidden_states)
        finally:
            experts.token_kinds = None

    return pre_dispatch


def _taking_features(inner: Submodule, travelling: int) -> Submodule:
    def pre_dispatch(node: Any, stacked: Tensor) -> Any:
        hidden_states, features = take_features(stacked, travelling)
        node.layer_state.deepstack = node.detach(features)
        return inner(node, hidden_states)

    return pre_dispatch


def _adding_feature(inner: Submodule) -> Submodule:
    def combine(node: Any, expert_output: Tensor) -> Tensor:
        # Upstream's node ends in the decoder's last norm, which comes behind the feature here.
        ends_decoder, node.is_last_layer = node.is_last_layer, False
        hidden_states = inner(node, expert_output)
        features, node.layer_state.deepstack = node.layer_state.deepstack, None
        features.record_stream(torch.cuda.current_stream())
        hidden_states = add_next_feature(hidden_states, features)
        norm = node.chunk_state.model.decoder.final_layernorm
        return norm(hidden_states) if ends_decoder and norm is not None else hidden_states

    return combine
