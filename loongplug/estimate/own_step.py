"""One step of a rank that encodes and does not decode."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loongplug.estimate.edge_ends import EncoderEnd, GivenStates
from loongplug.estimate.encoded_units import (
    EncodedUnits,
    UnitCosts,
    blank_unit,
    encoded_units,
    largest_unit,
)
from loongplug.estimate.ledger import Ledger
from loongplug.estimate.ranks import EstimatedRank
from loongplug.estimate.trace import StageBefore, Tracer
from loongplug.estimate.units import MicrobatchSize, UnitSize
from loongplug.hetero.operations import BEGIN, END
from loongplug.models.encoder_stages import payload_widths
from loongplug.training.arguments import ParsedArguments


class OwnStep:
    """A step of a rank of an encoder's own stage: units traced once, then followed for any like it.

    ``host`` is nothing: no tensors leave by name. ``trains`` says whether the stage, one before it
    or what goes with it has gradients.
    """

    host = 0

    def __init__(
        self,
        rank: EstimatedRank,
        parsed: ParsedArguments,
        units: Sequence[UnitSize],
        *,
        trains_before: bool = False,
    ) -> None:
        """``units`` of a step, one for each piece of each microbatch that this rank encodes.

        ``trains_before``: a stage of the encoder before the rank's has gradients.
        """
        model: Any = parsed.model
        (self._chunk,) = rank.chunks
        (entry,) = self._chunk.encoders
        self.role = model.keys[entry.name]
        self._trains_before = trains_before
        self.trains = trains_before or self._chunk.trains(entry)
        self._engine = rank.engine.encoders[entry.name]
        self._args = parsed.args
        architecture = model.encoder(entry.name)
        blank = blank_unit(architecture)
        largest = largest_unit(units, blank=blank)
        widths = payload_widths(architecture)
        before = None
        if rank.stage:
            before = StageBefore(width=widths[rank.stage - 1], trains=trains_before)
        likes = {  # of the encoder alone
            each: MicrobatchSize(units={entry.name: each}, row_length=0)
            for each in (blank, largest)
        }
        traced = {
            each: Tracer(parsed.args, model, like).encoder(self._chunk, entry, before=before)
            for each, like in likes.items()
        }
        costs = UnitCosts(
            blank=traced[blank],
            blank_rows=blank.rows,
            largest=traced[largest],
            largest_rows=largest.rows,
        )
        encoded = encoded_units(self._chunk, model, entry.name, units, costs=costs)
        itemsize = self._chunk.config.params_dtype.itemsize

        def states(unit: UnitSize, *, width: int) -> int:
            return sum(map(architecture.states, unit.grids)) * width * itemsize

        if rank.stage < len(widths):
            made = tuple(states(each, width=widths[rank.stage]) for each in units)
            encoded = replace(encoded, states=made)
        self._given: tuple[int, ...] = ()
        if before is not None:
            self._given = tuple(states(each, width=before.width) for each in units)
            kept = states(blank, width=before.width) if costs.blank.keeps_input else 0
            encoded = replace(encoded, row=0, blank_input=kept)
        self._encoded: EncodedUnits = encoded

    def follow(self, ledger: Ledger, *, rank: int) -> None:
        """Enter what a step of ``rank`` makes and frees, with the same chunk as this process's."""
        made = self._engine.place.made_by(rank, training=True)
        end = EncoderEnd(
            plan=self._engine.plan(
                encoder_replicas=((0,),) * len(self._encoded.units),
                training=True,
                trains=self.trains,
                trains_before=self._trains_before,
                rank=rank,
            ),
            encoded=self._encoded,
            pieces=len(made),
            trains=self.trains,
            leads=not self._features or rank in made[0].edge.feature_senders,
            copies=self._features
            and self._args.sequence_parallel
            and max(len(each.samples) for each in made) > 1,
            in_flight=self._engine.in_flight(rank),
            given=self._given_states() if self._given else None,
        )
        end.at(ledger, BEGIN)
        end.at(ledger, END)

    @property
    def _features(self) -> bool:
        """Whether features come of this stage, not states for the next one."""
        return self._encoded.states is None

    def _given_states(self) -> GivenStates:
        """New ones, of the stage before."""
        return GivenStates(
            nbytes=self._given,
            trains=self._trains_before,
            keeps=self._encoded.costs.largest.keeps_input,
        )
