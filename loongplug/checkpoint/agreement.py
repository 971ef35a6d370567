"""An error on one rank becomes the same error on all of them."""

import torch.distributed as dist


class CommonError(Exception):
    """An error that every rank has raised: all are still in step."""


class CommonValueError(CommonError, ValueError):
    """One for the user to mend."""


class CommonRuntimeError(CommonError, RuntimeError):
    """One that is a bug, or the machine's."""


def raise_together(error: Exception | None) -> None:
    """Raise on every rank when any rank has an error; return on every rank otherwise.

    Collective: the default group, when there is one. Ranks with the same message are reported
    once.

    Raises:
        CommonValueError: every rank's error is a ValueError; with all distinct messages, and the
            ranks that had them.
        CommonRuntimeError: some rank has another error, which is a bug or the machine's; the same
            text.
    """
    mine = None if error is None else (_message(error), isinstance(error, ValueError))
    everyone = [mine]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    ranks: dict[str, list[str]] = {}
    for rank, found in enumerate(everyone):
        if found is not None:
            ranks.setdefault(found[0], []).append(str(rank))
    if not ranks:
        return
    everywhere = len(ranks) == 1 and None not in everyone
    text = "\n".join(
        message if everywhere else f"rank {', '.join(where)}: {message}"
        for message, where in ranks.items()
    )
    expected = all(found[1] for found in everyone if found is not None)
    raise (CommonValueError if expected else CommonRuntimeError)(text) from error


def _message(error: Exception) -> str:
    """The text of a ValueError says everything; that of a KeyError, for one, does not."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
