"""Where the entries of a model lie in the world, and what follows from it. Pure arithmetic.

A placement is the same on every rank. What one rank needs of it is an :class:`Edge`: who encodes
and who consumes within its own model replica.
"""

from dataclasses import dataclass
from itertools import chain

from loongplug.models.entries import Entry
from loongplug.parallel.layout import Layout, encoder_layout


@dataclass(frozen=True, kw_only=True)
class PlacedEntry:
    """An entry of the model and its layout.

    ``into`` names the entry that consumes its output, None for the decoder. With ``same_units``,
    all its replicas of one model replica encode the same units; else each unit is encoded by one.
    """

    name: str
    layout: Layout
    into: str | None = None
    same_units: bool = False

    def holds(self, rank: int) -> bool:
        """Whether its modules lie on ``rank``; where it has stages, on those of the first alone."""
        return rank in self.layout.ranks and self.layout.coordinates(rank).pp == 0


@dataclass(frozen=True, kw_only=True)
class Edge:
    """From an encoder to its consumers, within one model replica. All ranks are of the world.

    The ranks of each tuple of ``replicas`` encode the same units together, and different ones
    encode different units. ``consumers`` are the ranks that the features go to: those of the
    decoder's first stage, by their coordinates.
    """

    replicas: tuple[tuple[int, ...], ...]
    consumers: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that take part in an exchange, ascending."""
        return tuple(sorted({*chain(*self.replicas), *self.consumers}))

    def replica_of(self, rank: int) -> int | None:
        """Which replica ``rank`` encodes with; None where it does not encode."""
        return next((n for n, ranks in enumerate(self.replicas) if rank in ranks), None)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All entries of a model, and the edges between them.

    Raises:
        ValueError: an entry lies neither on all ranks of the one that it leads into nor on those
            of its first stage, or has a replica on several model replicas.
    """

    entries: tuple[PlacedEntry, ...]

    def __post_init__(self) -> None:
        for entry in self.entries:
            if entry.into is not None:
                _check_ranks(entry, self.entry(entry.into))

    def entry(self, name: str) -> PlacedEntry:
        """The entry of this name, which is one of the model's."""
        (found,) = (entry for entry in self.entries if entry.name == name)
        return found

    def edge(self, name: str, *, rank: int) -> Edge:
        """The edge from the entry ``name``, in the model replica of ``rank``."""
        consumer = self._consumer_of(name)
        return self._edge(name, consumer.layout.group("tp_cp_pp", rank))

    def edges(self, name: str) -> tuple[Edge, ...]:
        """The edge from the entry ``name`` in each model replica."""
        replicas = self._consumer_of(name).layout.groups("tp_cp_pp")
        return tuple(self._edge(name, ranks) for ranks in replicas)

    def exchange_groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process group that the output of ``name`` is exchanged in."""
        return tuple(edge.ranks for edge in self.edges(name))

    def on_every_stage(self, name: str) -> bool:
        """Whether an entry lies on all ranks of the one that it leads into."""
        entry = self.entry(name)
        return all(entry.holds(rank) for rank in self._consumer_of(name).layout.ranks)

    def gradient_factor(self, name: str) -> float:
        """What the sum of the gradients over all replicas of ``name`` is multiplied by.

        1 where each unit is encoded once, 1 / n where n replicas encode the same unit.
        """
        entry = self.entry(name)
        if not entry.same_units:
            return 1.0
        (together,) = self.edge(name, rank=entry.layout.first_rank).replicas
        return entry.layout.tp / len(together)

    def _consumer_of(self, name: str) -> PlacedEntry:
        into = self.entry(name).into
        assert into is not None, f"nothing comes out of {name!r}"
        return self.entry(into)

    def _edge(self, name: str, model_replica: list[int]) -> Edge:
        entry, consumer = self.entry(name), self._consumer_of(name)
        encoding = [rank for rank in model_replica if entry.holds(rank)]
        replicas = {tuple(entry.layout.group("tp", rank)) for rank in encoding}
        return Edge(
            replicas=(tuple(encoding),) if entry.same_units else tuple(sorted(replicas)),
            consumers=tuple(rank for rank in model_replica if consumer.holds(rank)),
        )


def first_stage_tp(decoder: Layout, *, entry: Entry, tp: int) -> Placement:
    """Every unit is encoded by all ranks of the first stage's tensor parallel group.

    With a ``tp`` below the decoder's, several replicas encode the same unit (heterogeneous TP).
    """
    layout = encoder_layout(decoder, tp=tp, on_first_stage=True)
    return _of_two(entry, layout, decoder, same_units=True)


def first_stage_dp(decoder: Layout, *, entry: Entry, tp: int) -> Placement:
    """The replicas in the first stage's tensor parallel group encode different units."""
    layout = encoder_layout(decoder, tp=tp, on_first_stage=True)
    return _of_two(entry, layout, decoder, same_units=False)


def all_ranks_dp(decoder: Layout, *, entry: Entry, tp: int) -> Placement:
    """All ranks of a model replica encode, those of later stages too."""
    layout = encoder_layout(decoder, tp=tp, on_first_stage=False)
    return _of_two(entry, layout, decoder, same_units=False)


def _of_two(entry: Entry, layout: Layout, decoder: Layout, *, same_units: bool) -> Placement:
    """An encoder and the decoder that it leads into."""
    assert entry.into is not None, "an encoder leads somewhere"
    return Placement(
        entries=(
            PlacedEntry(name=entry.name, layout=layout, into=entry.into, same_units=same_units),
            PlacedEntry(name=entry.into, layout=decoder),
        )
    )


def _check_ranks(entry: PlacedEntry, consumer: PlacedEntry) -> None:
    """Raise ValueError unless ``entry`` lies on its consumer's ranks, by whole replicas."""
    everywhere = set(consumer.layout.ranks)
    first = {rank for rank in everywhere if consumer.holds(rank)}
    own = {rank for rank in entry.layout.ranks if entry.holds(rank)}
    if own not in (everywhere, first):
        raise ValueError(
            f"{entry.name!r} lies on ranks {_named(own)}, and what comes out of it goes into "
            f"{consumer.name!r}: expected all ranks of that, {_named(everywhere)}, or those of its "
            f"first stage, {_named(first)}."
        )
    model_replica = {
        rank: number
        for number, ranks in enumerate(consumer.layout.groups("tp_cp_pp"))
        for rank in ranks
    }
    for ranks in entry.layout.groups("tp"):
        if len({model_replica[rank] for rank in ranks}) > 1:
            raise ValueError(
                f"ranks {_named(set(ranks))} hold one replica of {entry.name!r} and several of "
                f"{consumer.name!r}: give {entry.name!r} a tensor parallel size that divides the "
                f"{len(consumer.layout.group('tp_cp_pp', ranks[0]))} ranks of one."
            )


def _named(ranks: set[int]) -> str:
    """As users read them, "0 to 3" where none is left out."""
    ordered = sorted(ranks)
    if len(ordered) > 1 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
