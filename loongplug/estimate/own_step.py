"""One step of a rank that encodes and does not decode."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from loongplug.estimate.encoded_units import (
    EncodedUnits,
    UnitCosts,
    blank_unit,
    encoded_units,
    largest_unit,
)
from loongplug.estimate.encoder_bytes import EncoderBytes
from loongplug.estimate.ledger import Ledger
from loongplug.estimate.ranks import EstimatedRank
from loongplug.estimate.trace import StageBefore, Tracer
from loongplug.estimate.units import MicrobatchSize, UnitSize
from loongplug.estimate.wire_bytes import WireBytes
from loongplug.hetero.carrier import StageSpec, stage_ends
from loongplug.hetero.operations import BEGIN, END, Cargo
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
        itemsize = encoded.dtype.itemsize
        self._rows = tuple(sum(map(architecture.states, each.grids)) for each in units)  # of states
        if rank.stage < len(widths):
            made = tuple(rows * widths[rank.stage] * itemsize for rows in self._rows)
            encoded = replace(encoded, states=made)
        if before is not None:
            of_blank = sum(map(architecture.states, blank.grids)) * before.width * itemsize
            kept = of_blank if costs.blank.keeps_input else 0
            encoded = replace(encoded, row=0, blank_input=kept)
        self._encoded: EncodedUnits = encoded

    def follow(self, ledger: Ledger, *, rank: int) -> None:
        """Enter what a step of ``rank`` makes and frees, with the same chunk as this process's."""
        place, spec = self._engine.place, self._encoded.spec()
        assert place.pieces is not None, "an encoder on ranks of its own"
        made = len(place.made_by(rank, training=True))
        states = StageSpec(
            rows=self._rows,
            microbatches=tuple(unit // made for unit in range(len(self._rows))),
            dtype=spec.dtype,
        )
        wire = partial(WireBytes, rank=rank, most=self._engine.in_flight(rank), trains=self.trains)
        features = wire(self._engine.crossings(spec, True, rank=rank).ends)
        links = wire(
            partial(stage_ends, spec=states, before=place.before, behind=place.behind),
            carries=(Cargo.STATES, Cargo.STATE_GRADIENTS),
        )
        side = EncoderBytes(
            plan=self._engine.plan(
                encoder_replicas=spec.encoder_replicas,
                training=True,
                trains=self.trains,
                trains_before=self._trains_before,
                rank=rank,
            ),
            encoded=self._encoded,
            wires=(features, links),
            trains_before=self._trains_before,
        )
        side.at(ledger, BEGIN)
        side.at(ledger, END)
