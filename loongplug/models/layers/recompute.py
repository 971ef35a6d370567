"""What a recomputed layer needs: an input with a gradient, and the same random numbers again."""

from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def input_for_recompute(hidden_states: Tensor, *, layers: nn.Module) -> Tensor:
    """``hidden_states`` such that recomputed ``layers`` have gradients, any shape and dtype.

    autograd looks at a recomputed layer's inputs alone: where none of them needs a gradient,
    behind a frozen embedding for one, it would keep nothing of the layer, and the parameters
    would get no gradient, without an error. Such an input is made to need one. Frozen layers,
    and those that keep their activations, take it as it is.
    """
    config: TransformerConfig = layers.config
    if (
        config.recompute_granularity is not None
        and torch.is_grad_enabled()
        and not hidden_states.requires_grad
        and any(parameter.requires_grad for parameter in layers.parameters())
    ):
        hidden_states.requires_grad_()
    return hidden_states


def own_draws(*, sequence_parallel: bool) -> AbstractContextManager[None]:
    """Inside, each tensor parallel rank draws for itself, for a dropout.

    With sequence parallelism Megatron's blocks have entered that state for all their layers. To
    enter it once more would draw the same numbers, but leave a copy of it behind from which a
    recompute, which runs outside of the block, would go on: with other draws than the forward's.
    """
    if sequence_parallel:
        return nullcontext()
    forked: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
    return forked
