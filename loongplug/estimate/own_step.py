"""One step of a rank that encodes and does not decode."""

from collections.abc import Sequence
from typing import Any

from loongplug.estimate.edge_ends import EncoderEnd
from loongplug.estimate.encoded_units import UnitCosts, blank_unit, encoded_units, largest_unit
from loongplug.estimate.ledger import Ledger
from loongplug.estimate.ranks import EstimatedRank
from loongplug.estimate.trace import Tracer
from loongplug.estimate.units import MicrobatchSize, UnitSize
from loongplug.hetero.operations import BEGIN, END
from loongplug.training.arguments import ParsedArguments


class OwnStep:
    """A step of an encoder's own rank: units traced once, then followed for any rank like it.

    ``host`` is nothing: no tensors leave by name. ``trains`` says whether the encoder or what goes
    with it has gradients.
    """

    host = 0

    def __init__(
        self, rank: EstimatedRank, parsed: ParsedArguments, units: Sequence[UnitSize]
    ) -> None:
        """``units`` of a step, one for each piece of each microbatch that this rank encodes."""
        model: Any = parsed.model
        (self._chunk,) = rank.chunks
        (entry,) = self._chunk.encoders
        self.role = model.keys[entry.name]
        self.trains = self._chunk.trains(entry)
        self._engine = rank.engine.encoders[entry.name]
        self._args = parsed.args
        blank = blank_unit(model.encoder(entry.name))
        largest = largest_unit(units, blank=blank)
        traced = {
            each: Tracer(parsed.args, model, MicrobatchSize(units={entry.name: each})).encoder(
                self._chunk, entry
            )
            for each in (blank, largest)
        }
        costs = UnitCosts(
            blank=traced[blank],
            blank_rows=blank.rows,
            largest=traced[largest],
            largest_rows=largest.rows,
        )
        self._encoded = encoded_units(self._chunk, model, entry.name, units, costs=costs)

    def follow(self, ledger: Ledger, *, rank: int) -> None:
        """Enter what a step of ``rank`` makes and frees, with the same chunk as this process's."""
        made = self._engine.place.made_by(rank, training=True)
        end = EncoderEnd(
            plan=self._engine.plan(
                encoder_replicas=((0,),) * len(self._encoded.units),
                training=True,
                trains=self.trains,
                rank=rank,
            ),
            encoded=self._encoded,
            pieces=len(made),
            trains=self.trains,
            leads=rank in made[0].edge.feature_senders,
            copies=self._args.sequence_parallel and max(len(each.samples) for each in made) > 1,
        )
        end.at(ledger, BEGIN)
        end.at(ledger, END)
