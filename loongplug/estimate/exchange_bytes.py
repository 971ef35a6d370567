"""What the all-to-all between an encoder's ranks and the decoder's takes of one rank's memory."""

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import feature_transfers, gradient_transfers, size, within


@dataclass(frozen=True, kw_only=True)
class ExchangeBytes:
    """One rank's part of a step's exchanges; ``spec`` is what all of them know of its units."""

    edge: Edge
    rank: int
    spec: ExchangeSpec

    def consumed(self, units: range) -> dict[int, int]:
        """Bytes of what this rank's decoder takes of each unit; none where it takes none."""
        if self.rank not in self.edge.consumers:
            return {}
        part = self.edge.part_of(self.rank, parts=self.spec.parts)
        return {unit: size(self.spec.of_parts(unit)[part]) * self._payload for unit in units}

    def mine(self, units: range) -> list[int]:
        """Those of these units of which this rank encodes a share."""
        replica = self.edge.replica_of(self.rank)
        return [unit for unit in units if replica in self.spec.encoder_replicas[unit]]

    def gathered(self, members: range, *, joined: Container[int], copied: bool) -> int:
        """The most that it takes to bring these units' features here, beside their own payloads.

        What arrives is one piece of memory, what leaves another. Units that were ``joined`` lie in
        memory with others where they were made. With ``copied``, each unit's features then get
        memory of their own, but for whole payloads.
        """
        found = self._exchanged(members, back=False, joined=joined)
        return found.received + max(
            found.sent + found.taken,
            found.taken + found.joined,
            found.joined + (found.views if copied else 0),
        )

    def scattered(self, members: range) -> int:
        """The most that it takes to bring these units' gradients to the ranks that encoded them."""
        found = self._exchanged(members, back=True)
        return found.received + found.taken + max(found.sent, found.joined)

    @property
    def _payload(self) -> int:
        return self.spec.width * self.spec.dtype.itemsize

    def _exchanged(
        self, members: range, *, back: bool, joined: Container[int] = ()
    ) -> "_Exchanged":
        """Rows go from where they are part of those it ``has`` to be part of those it ``needs``."""
        units = self.spec.part(members)
        has, needs = (units.needed, units.encoded) if back else (units.encoded, units.needed)
        transfers = gradient_transfers if back else feature_transfers
        sent = received = taken = viewed = 0
        whole: set[int] = set()  # units of which one transfer brings all that is needed
        parts: dict[int, int] = {}  # what is needed of others
        sharded = units.shards is not None
        for each in transfers(self.edge, units.encoder_replicas, parts=units.parts):
            rows = units.rows(each)
            count = size(rows)
            here, there = each.source == self.rank, each.target == self.rank
            if here and len(within(rows, has(each))) > 1:
                taken += count
            if here and not there:
                sent += count
            if there and not here:
                received += count
            if there and count == size(needs(each)):
                whole.add(each.unit)
                alone = here and not sharded and members[each.unit] not in joined
                viewed += 0 if alone else count
            elif there:
                parts[each.unit] = size(needs(each))
        together = sum(rows for unit, rows in parts.items() if unit not in whole)
        return _Exchanged(
            *(rows * self._payload for rows in (sent, received, taken, together, viewed))
        )


class _Exchanged(NamedTuple):
    """Bytes of an exchange on one rank.

    ``taken`` are copied before they are sent or stay; ``joined`` is what is put together of several
    transfers, ``views`` what is used as it came, and lies in memory with other units.
    """

    sent: int
    received: int
    taken: int
    joined: int
    views: int
