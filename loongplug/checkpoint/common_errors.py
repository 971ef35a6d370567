"""An error on one rank becomes the same error on all of them, in words for the user."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from loongplug.parallel.failure import FULL, full_disk


class CommonError(Exception):
    """An error that every rank has raised: all are still in step."""


class CommonValueError(CommonError, ValueError):
    """A common error that the user can mend."""


class CommonRuntimeError(CommonError, RuntimeError):
    """A common error that is a bug, or the machine's."""


@contextmanager
def together(output: Path | None = None) -> Iterator[None]:
    """What goes wrong inside on any rank is raised on every rank, as by :func:`raise_together`.

    With ``output``, inside writes there: what the machine says of that is put in words for the
    user. Collective: the default group, when there is one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is, the other ranks are waiting
        error = caught
        of_the_system = caught if isinstance(caught, OSError) else full_disk(caught)
        if output is not None and of_the_system is not None:
            error = write_error(output, of_the_system)
    raise_together(error)


def raise_together(error: Exception | None) -> None:
    """Raise on every rank when any rank has an error; return on every rank otherwise.

    Collective: the default group, when there is one. Ranks with the same message are reported
    once.
    """
    mine = None if error is None else (_message(error), isinstance(error, ValueError))
    everyone = of_all_ranks(mine)
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


def of_all_ranks[T](mine: T) -> list[T]:
    """What each rank has, by its number. Collective: the default group, when there is one."""
    everyone = [mine]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return everyone


def _message(error: Exception) -> str:
    """The text of a ValueError says everything; that of a KeyError, for one, does not."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def write_error(output: Path | str, error: OSError) -> ValueError:
    """The sentence for an ``output``, a path with or without its flag, that cannot be written."""
    what = FULL.get(error.errno or 0)
    cure = "make room, or give another place" if what else "give another place"
    return ValueError(f"{output} cannot be written ({what or error}): {cure}.")
