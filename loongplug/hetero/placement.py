"""Where the entries of a model lie in the world, and what follows from it. Pure arithmetic.

A placement is the same on every rank. What one rank needs of it is an :class:`Edge`: who encodes
and who consumes within its own model replica. An entry on ranks of its own, apart from the one
that it leads into, has replicas in any number, and a :class:`ApartPiece` for each pair that meets.

NCCL has a communicator in a process group for what all ranks do together, and one for each two
ranks that send each other messages. Each has a CUDA stream, and memory on the device.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched, chain, combinations, pairwise

from loongplug.models.entries import Entry
from loongplug.parallel.layout import Layout, encoder_layout

Pair = tuple[int, int]  # of the world's ranks: who sends, and who receives

# Of Megatron's groups, those that a step, its optimizer or a save works in, by the layout's kinds.
_DENSE = ("tp", "cp", "pp", "dp_cp", "tp_pp", "tp_cp_dp_pp")
_OF_EXPERTS = ("ep", "etp", "edp", "etp_ep", "etp_ep_pp")


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

    The ranks of each tuple of ``replicas`` encode the same units together; of an encoder on other
    ranks they are those of its last stage. ``consumers`` are the decoder's first stage, ascending,
    so that the ranks of one context parallel part are neighbours.
    """

    replicas: tuple[tuple[int, ...], ...]
    consumers: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that take part in an exchange, ascending."""
        return tuple(sorted({*chain(*self.replicas), *self.consumers}))

    def parts(self, number: int) -> tuple[tuple[int, ...], ...]:
        """The consumers that need the same rows of a sequence in so many parts, part by part."""
        each, left = divmod(len(self.consumers), number)
        assert not left, (self.consumers, number)
        return tuple(batched(self.consumers, each))

    def meetings(self, replica: int, *, cp: int) -> tuple[Pair, ...]:
        """Which rank of a replica meets which tensor parallel rank of each context part.

        All ranks of the replica have the same, and one of them, in turn, brings it: rank e to rank
        e mod TP, so that few pairs have a communicator, and all of a group get as much. A rank of
        the decoder's first stage meets itself alone, with the rows of all parts.
        """
        ranks, parts = self.replicas[replica], self.parts(cp)
        turn = replica // max(1, len(parts[0]) // len(ranks))
        brings = ranks[turn % len(ranks)]
        if brings in self.consumers:
            return ((brings, brings),)
        return tuple((brings, part[(brings - part[0]) % len(part)]) for part in parts)

    def replica_of(self, rank: int) -> int | None:
        return next((n for n, ranks in enumerate(self.replicas) if rank in ranks), None)


@dataclass(frozen=True, kw_only=True)
class ApartPiece:
    """What one encoder replica makes of one decoder replica's microbatch: these samples' rows.

    ``edge`` leads to that replica of the decoder. ``replica`` is the encoder's number, ``decoder``
    the decoder's, by their data parallel ranks. ``samples`` are places within the microbatch, from
    0 on, and never empty.
    """

    edge: Edge
    replica: int
    decoder: int
    samples: range

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the encoder's last stage that have its features."""
        return self.edge.replicas[self.replica]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All entries of a model, and the edges between them.

    An entry that is not apart lies on all ranks of the one that it leads into, or on those of its
    first stage, with no replica on several model replicas (:func:`encoder_layout`).
    """

    entries: tuple[PlacedEntry, ...]

    def entry(self, name: str) -> PlacedEntry:
        (found,) = (entry for entry in self.entries if entry.name == name)
        return found

    def is_apart(self, name: str) -> bool:
        entry = self.entry(name)
        if entry.into is None:
            return False
        return set(entry.layout.ranks).isdisjoint(self.entry(entry.into).layout.ranks)

    def pieces(self, name: str, *, micro_batch_size: int) -> tuple[ApartPiece, ...]:
        """The pieces of the entry ``name``, which lies apart: one for each pair that meets.

        They are a microbatch of all decoder replicas, in the order of the samples. Of B, replica j
        of n of the encoder's has those from floor(j B / n) up to floor((j + 1) B / n).
        """
        assert self.is_apart(name), f"{name!r} lies where its consumer lies: see edges"
        encoder, decoder = self.entry(name).layout, self._consumer_of(name).layout
        replicas = tuple(map(tuple, encoder.stage(-1)))
        edges = [Edge(replicas=replicas, consumers=tuple(ranks)) for ranks in decoder.stage(0)]
        samples = decoder.dp * micro_batch_size
        found = []
        for replica in range(encoder.dp):
            first = replica * samples // encoder.dp
            behind = (replica + 1) * samples // encoder.dp
            while first < behind:
                consumer, place = divmod(first, micro_batch_size)
                count = min(behind - first, micro_batch_size - place)
                found.append(
                    ApartPiece(
                        edge=edges[consumer],
                        replica=replica,
                        decoder=consumer,
                        samples=range(place, place + count),
                    )
                )
                first += count
        return tuple(found)

    def edge(self, name: str, *, rank: int) -> Edge:
        """The edge from the entry ``name``, in the model replica of ``rank``."""
        return self._edge(name, self._consumer_of(name).layout.group("tp_cp_pp", rank))

    def edges(self, name: str) -> tuple[Edge, ...]:
        replicas = self._consumer_of(name).layout.groups("tp_cp_pp")
        return tuple(self._edge(name, ranks) for ranks in replicas)

    def on_every_stage(self, name: str) -> bool:
        """Whether an entry lies on all ranks of the one that it leads into."""
        entry = self.entry(name)
        return all(entry.holds(rank) for rank in self._consumer_of(name).layout.ranks)

    def gradient_factor(self, name: str) -> float:
        """What the sum of the gradients over all replicas of ``name`` is multiplied by.

        1 where each unit is encoded once, 1 / n where n replicas encode the same unit and each has
        its whole gradient. Context parallel ranks have parts of it, which add up.
        """
        entry = self.entry(name)
        if not entry.same_units:
            return 1.0
        (together,) = self.edge(name, rank=entry.layout.first_rank).replicas
        consumer = self._consumer_of(name).layout
        assert entry.layout.tp <= consumer.tp, (
            "a replica over parts of a row has parts of gradients"
        )
        return entry.layout.tp * consumer.cp / len(together)

    def _consumer_of(self, name: str) -> PlacedEntry:
        into = self.entry(name).into
        assert into is not None, f"nothing comes out of {name!r}"
        return self.entry(into)

    def _edge(self, name: str, model_replica: list[int]) -> Edge:
        assert not self.is_apart(name), f"{name!r} lies on ranks of its own: see pieces"
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


def all_apart(decoder: Layout, encoders: Mapping[str, Layout], *, into: str) -> Placement:
    """Every entry on ranks of its own, by its layout's ``first_rank`` (``rank_offset`` in a YAML).

    All ``encoders``, by name, lead ``into`` the decoder. Raises ValueError where two entries have
    ranks in common, or ranks before or between them have none.
    """
    entries = (
        *(PlacedEntry(name=name, layout=layout, into=into) for name, layout in encoders.items()),
        PlacedEntry(name=into, layout=decoder),
    )
    assert all(layout.cp == layout.ep == 1 for layout in encoders.values()), encoders
    for entry, other in combinations(entries, 2):
        _check_apart(entry, other)
    left = set(range(max(entry.layout.ranks.stop for entry in entries)))
    left.difference_update(*(entry.layout.ranks for entry in entries))
    if left:
        raise ValueError(
            f"no module lies on {_ranks(left)}: give a module more replicas, or the modules behind "
            f"a smaller rank_offset."
        )
    return Placement(entries=entries)


def one_apart(
    decoder: Layout, *, entry: Entry, tp: int, dp: int, rank_offset: int, pp: int = 1
) -> Placement:
    """The encoder on ranks of its own, from ``rank_offset`` on; ValueError if they overlap."""
    layout = Layout(tp=tp, pp=pp, dp=dp, first_rank=rank_offset)
    placement = _of_two(entry, layout, decoder, same_units=False)
    _check_apart(*placement.entries)
    return placement


def _of_two(entry: Entry, layout: Layout, decoder: Layout, *, same_units: bool) -> Placement:
    assert entry.into is not None, "an encoder leads somewhere"
    return Placement(
        entries=(
            PlacedEntry(name=entry.name, layout=layout, into=entry.into, same_units=same_units),
            PlacedEntry(name=entry.into, layout=decoder),
        )
    )


def _check_apart(entry: PlacedEntry, other: PlacedEntry) -> None:
    own, others = set(entry.layout.ranks), set(other.layout.ranks)
    both = own & others
    if own == others and entry.into == other.name:
        raise ValueError(
            f"{entry.name!r} lies on {_ranks(both)}, which are those of {other.name!r}; "
            f"that is a colocated mode: leave rank_offset away."
        )
    if both:
        raise ValueError(
            f"{entry.name!r} on {_ranks(own)} and {other.name!r} on {_ranks(others)} share "
            f"{_ranks(both)}: change a rank_offset or a size, so that no rank has both."
        )


def _ranks(ranks: set[int]) -> str:
    first, last = min(ranks), max(ranks)
    if first == last:
        return f"rank {first}"
    if len(ranks) == last - first + 1:
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}"


def piece_pairs(edges: Iterable[Edge], *, cp: int) -> list[Pair]:
    """Who sends whom features within model replicas, of an encoder that lies on all ranks."""
    ways = (edge.meetings(each, cp=cp) for edge in edges for each in range(len(edge.replicas)))
    return sorted({pair for pair in chain(*ways) if pair[0] != pair[1]})


def pipeline_pairs(ranks: Sequence[int], *, virtual: bool) -> dict[str, list[Pair]]:
    """Who sends what to whom in a pipeline of these ranks, by the name of the process group."""
    there = {"activations": [*pairwise(ranks)]}
    if virtual:
        there["activations_around"] = [(ranks[-1], ranks[0])]
    back = {name.replace("activations", "gradients"): reverse(there[name]) for name in there}
    return there | back


def apart_pairs(pieces: Iterable[ApartPiece], *, cp: int) -> list[Pair]:
    """Who sends features of these ``pieces`` to whom."""
    return sorted({*chain(*(each.edge.meetings(each.replica, cp=cp) for each in pieces))})


def stage_pairs(layout: Layout) -> list[Pair]:
    """Who hands states on to whom, between the stages of an encoder."""
    return [pair for ranks in layout.groups("pp") for pair in pairwise(ranks)]


def there_and_back(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs of the process group of a kind of rows, and of that of what comes back for them."""
    there = [*pairs]
    return [there, reverse(there)]


def reverse(pairs: Iterable[Pair]) -> list[Pair]:
    return [(receiver, sender) for sender, receiver in pairs]


def count(groups: Iterable[Iterable[Pair]]) -> Counter[int]:
    """The communicators of each rank in process groups in which these pairs send messages."""
    joined = chain(*({frozenset(pair) for pair in pairs} for pairs in groups))
    return Counter(chain(*joined))


def megatrons(layout: Layout, *, experts: bool) -> int:
    """The communicators of Megatron's groups for one module on each of its ranks."""
    kinds = (*_DENSE, *(_OF_EXPERTS if experts else ()))
    return sum(len(layout.group(kind, layout.first_rank)) > 1 for kind in kinds)
