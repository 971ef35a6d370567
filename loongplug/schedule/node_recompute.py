"""Parts of a layer that are recomputed in its backward, each within its schedule node.

The exchanges of the expert parallel group are in other nodes, so none of them happens twice, and
the schedule keeps its shape. What tensor parallel ranks send each other in a node is sent again.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from loongplug.schedule.tensor_names import RECOMPUTED

ATTENTION, POST_ATTENTION, EXPERTS = RECOMPUTED


def recomputed_before_dispatch(
    layer: TransformerLayer, parts: Collection[str]
) -> Callable[..., Any]:
    """The function of a layer's first node, with what ``parts`` names computed twice.

    It gives, and leaves in the layer's state, what Megatron's does.
    """
    experts = layer.mlp

    def before_dispatch(node: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        state = node.chunk_state
        rotary, packed, kinds = state.rotary_pos_emb, state.packed_seq_params, state.padding_mask

        def attend(hidden_states: Tensor) -> Tensor:
            attended, _ = layer._forward_attention(
                hidden_states=hidden_states, rotary_pos_emb=rotary, packed_seq_params=packed
            )
            return attended

        def choose(hidden_states: Tensor) -> tuple[Tensor | None, ...]:
            normed = layer.pre_mlp_layernorm(hidden_states)  # [s, b, hidden]
            # Before the router, as Megatron has it: backward adds up their gradients in turn.
            shared = experts.shared_experts_compute(normed)  # [s, b, hidden]
            # both [s * b, experts]
            probs, chosen = experts.route(normed, None if kinds is None else kinds.transpose(0, 1))
            return normed, probs, chosen, shared

        hidden_states = _computed(attend, hidden_states, twice=ATTENTION in parts)
        normed, probs, chosen, shared = _computed(
            choose, hidden_states, twice=POST_ATTENTION in parts
        )
        tokens, probs = experts.preprocess(normed, probs, chosen)
        node.layer_state.residual = node.detach(hidden_states)
        if shared is not None:
            node.layer_state.shared_expert_output = node.detach(shared)
        return tokens, probs

    return before_dispatch


def recomputed_experts(layer: TransformerLayer) -> Callable[..., Tensor]:
    """The function of a layer's experts' node, computed twice."""
    experts = layer.mlp

    def compute(node: Any, dispatched: Tensor) -> Tensor:
        then = dict(vars(experts.token_dispatcher))  # what it knows of this microbatch
        again = False

        def run(dispatched: Tensor, probs: Tensor) -> Tensor:
            nonlocal again
            with _as_it_was(experts.token_dispatcher, then if again else {}):
                output, _ = experts.routed_experts_compute(dispatched, probs)
            again = True
            return output

        output: Tensor = _computed(run, dispatched, node.layer_state.dispatched_probs, twice=True)
        return output

    return compute


def _computed(function: Callable[..., Any], *inputs: Tensor, twice: bool) -> Any:
    return tensor_parallel.checkpoint(function, False, *inputs) if twice else function(*inputs)


@contextmanager
def _as_it_was(dispatcher: Any, then: dict[str, Any]) -> Iterator[None]:
    """Inside, the dispatcher is as it was ``then``; other microbatches have passed since.

    With nothing given it stays as it is, and keeps what it learns.
    """
    now = dict(vars(dispatcher))
    vars(dispatcher).update(then)
    try:
        yield
    finally:
        if then:
            vars(dispatcher).clear()
            vars(dispatcher).update(now)
