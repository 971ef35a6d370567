"""Who draws for a dropout whose ranks have to drop differently."""

from contextlib import AbstractContextManager, nullcontext

from megatron.core.tensor_parallel import get_cuda_rng_tracker


def own_draws(*, sequence_parallel: bool) -> AbstractContextManager[None]:
    """Inside, each tensor parallel rank draws for itself.

    With sequence parallelism Megatron's blocks have entered that state for all their layers. To
    enter it once more would draw the same numbers, but leave a copy of it behind from which a
    recompute, which runs outside of the block, would go on: with other draws than the forward's.
    """
    if sequence_parallel:
        return nullcontext()
    forked: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
    return forked
