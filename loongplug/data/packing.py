"""Which samples share a sequence: best fit within a bounded look-ahead."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LOOK_AHEAD = 256  # samples, unless --packing-look-ahead says otherwise
Pack = tuple[int, ...]  # positions in the stream of samples, ascending


@dataclass(frozen=True)
class PackingState:
    """All that a planner remembers: how far it has read, and what of that is in no pack yet."""

    read: int  # positions 0 to read - 1 have been given
    held: tuple[tuple[int, int], ...]  # (position, tokens) of the others, by position


class PackPlanner:
    """Deals a stream of samples out into packs of at most ``seq_length`` tokens.

    A pack starts with the first sample p that is in none yet. It is filled up, longest first,
    with samples that still fit, of those at positions p + 1 to p + look_ahead - 1. A planner made
    from another one's :attr:`state` goes on with the same packs, or with another ``look_ahead``.
    """

    def __init__(
        self, *, seq_length: int, look_ahead: int, state: PackingState | None = None
    ) -> None:
        """ValueError for a sample in ``state`` that does not fit any more."""
        self._seq_length = seq_length
        self._look_ahead = look_ahead
        self._held: dict[int, int] = {}  # position -> tokens, by position
        self._by_length: list[tuple[int, int]] = []  # (tokens, -position) of the same, ascending
        self.read = 0  # the position whose length is next to be added
        if state is not None:
            for position, length in state.held:
                self._hold(position, length)
            self.read = state.read

    @property
    def state(self) -> PackingState:
        return PackingState(read=self.read, held=tuple(self._held.items()))

    def add(self, length: int) -> None:
        """Take the next sample, of ``length`` tokens; ValueError for one longer than a pack."""
        self._hold(self.read, length)
        self.read += 1

    def next_pack(self, *, ended: bool = False) -> Pack | None:
        """The next pack, or None: more samples are to come first or, with ``ended``, none is."""
        first = next(iter(self._held), self.read)
        if not self._held or (self.read - first < self._look_ahead and not ended):
            return None
        pack = [first]
        room = self._seq_length - self._held.pop(first)
        self._by_length.pop(bisect_right(self._by_length, (self._seq_length - room, -first)) - 1)
        while (found := bisect_right(self._by_length, (room, 1))) > 0:
            length, negative = self._by_length.pop(found - 1)
            del self._held[-negative]
            pack.append(-negative)
            room -= length
        return tuple(sorted(pack))

    def _hold(self, position: int, length: int) -> None:
        if not 0 <= length <= self._seq_length:
            raise ValueError(
                f"The sample at position {position} has {length} tokens: expected 0 to "
                f"{self._seq_length} (--seq-length)."
            )
        self._held[position] = length
        # Of samples of one length, the one that has waited longest is taken first.
        insort(self._by_length, (length, -position))


def packs_once(lengths: Iterable[int], *, seq_length: int, look_ahead: int) -> Iterator[Pack]:
    """The packs of samples of such lengths, each of them once; asks for no more than it needs."""
    planner = PackPlanner(seq_length=seq_length, look_ahead=look_ahead)
    for length in lengths:
        planner.add(length)
        while pack := planner.next_pack():
            yield pack
    while pack := planner.next_pack(ended=True):
        yield pack
