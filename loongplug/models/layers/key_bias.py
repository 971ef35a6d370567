"""The keys' bias, which has no effect in attention without rope."""

from torch import Tensor


def hold_key_bias(bias: Tensor, *, head: int) -> None:
    """Give the keys' part of ``bias``, of fused q, k and v, a gradient of exactly zero.

    Without rope it shifts all scores of a query by the same amount, so it changes nothing.
    Its computed gradient is rounding noise, different in each layout, of which Adam makes full
    steps. Where a model has no such bias it stays at the zeros that it starts with.

    Args:
        bias: [heads / tp * 3 * head], q, k and v of each head in turn.
        head: channels of a head.
    """

    def without_keys(gradient: Tensor) -> Tensor:
        apart = gradient.unflatten(0, (-1, 3, head)).clone()  # [heads / tp, q k v, head]
        apart[:, 1] = 0
        return apart.flatten()

    bias.register_hook(without_keys)
