"""An error on one rank becomes the same error on all of them."""

import torch.distributed as dist


def raise_together(error: Exception | None) -> None:
    """Raise on every rank when any rank has an error; return on every rank otherwise.

    Collective: the default group, when there is one. Ranks with the same message are reported
    once.

    Raises:
        ValueError: with every distinct message, and the ranks that had it.
    """
    if not dist.is_initialized():
        if error is not None:
            raise ValueError(str(error)) from error
        return
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error) or repr(error))
    ranks: dict[str, list[str]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            ranks.setdefault(message, []).append(str(rank))
    if not ranks:
        return
    everywhere = len(ranks) == 1 and None not in messages
    text = "\n".join(
        message if everywhere else f"rank {', '.join(where)}: {message}"
        for message, where in ranks.items()
    )
    raise ValueError(text) from error
