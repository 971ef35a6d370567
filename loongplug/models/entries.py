"""Entries: the modules of a model that have a parallel layout of their own, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Role(Enum):
    """The part that an entry has in a step."""

    ENCODER = "encoder"
    DECODER = "decoder"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A module with a layout of its own, and the modules that lie where it lies.

    ``name`` is the module's in the built model: the prefix of its parameters, its part of the
    optimizer, its parallel state. ``media`` are what an encoder takes, ``beside`` the names of
    modules on the same ranks, such as its projector, and ``into`` the entry that consumes what
    comes out.
    """

    name: str
    role: Role
    media: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    into: str | None = None

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The names of all its modules, its own first: the order in which they run."""
        return (self.name, *self.beside)


def encoders(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries that encode media."""
    return tuple(entry for entry in entries if entry.role is Role.ENCODER)


def only_decoder(entries: Sequence[Entry]) -> Entry:
    """The decoder, which every model has one of."""
    (entry,) = (entry for entry in entries if entry.role is Role.DECODER)
    return entry
