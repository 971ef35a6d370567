"""What units of media take of a rank that encodes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loongplug.data.microbatch import Share
from loongplug.estimate.trace import UnitBytes
from loongplug.estimate.units import UnitSize
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.multimodal import MultimodalModel

_INPUT_BYTES = 4  # float32, as it comes


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What units of any size cost: what lies between two traced ones grows with the rows.

    ``blank`` is the cost of the smallest, of so many ``blank_rows``, which stands in for no media.
    """

    blank: UnitBytes
    blank_rows: int
    largest: UnitBytes
    largest_rows: int

    def of(self, rows: int) -> UnitBytes:
        """Of a unit of so many."""
        more = max(rows, self.blank_rows) - self.blank_rows
        part = more / max(1, self.largest_rows - self.blank_rows)

        def at(low: int, high: int) -> int:
            return round(low + (high - low) * part)

        low, high = self.blank, self.largest
        return UnitBytes(
            kept=at(low.kept, high.kept),
            forward=at(low.forward, high.forward),
            backward=at(low.backward, high.backward),
            keeps_input=high.keeps_input,
        )


@dataclass(frozen=True, kw_only=True)
class EncodedUnits:
    """A step's units in an encoder: what each of them takes of a rank that encodes it.

    ``units`` are what the rank encodes of each where it encodes some of it; else they are whole.
    A token's features have so much ``width``, and are of ``dtype``. ``row`` are the bytes of a row
    of input, ``blank_input`` those of the input that the backward of a unit without media keeps.

    Of a stage of the encoder before its last, ``states`` are the bytes of what it makes of each
    unit, in the place of features.
    """

    units: Sequence[UnitSize]
    costs: UnitCosts
    width: int
    dtype: torch.dtype
    row: int
    blank_input: int
    states: tuple[int, ...] | None = None

    def made(self, unit: int) -> int:
        """Bytes of all that is made of a unit."""
        if self.states is not None:
            return self.states[unit]
        return self.units[unit].tokens * self.width * self.dtype.itemsize

    def cost(self, units: Sequence[int]) -> UnitBytes:
        """Of a pass in the encoder; without media that of the blank one, whose input is its own.

        The input of several units is a copy, which a backward keeps where it takes the input.
        """
        rows = sum(map(self._rows, units))
        cost = self.costs.of(rows)
        if not rows:
            return replace(cost, kept=cost.kept + self.blank_input)
        several = sum(self._rows(each) > 0 for each in units) > 1
        copy = rows * self.row if several else 0
        kept = copy if self.blank_input else 0
        return replace(cost, kept=cost.kept + kept, forward=cost.forward + copy)

    def input(self, units: Sequence[int]) -> int:
        """Bytes of their media."""
        return self.row * sum(map(self._rows, units))

    def spec(self) -> ExchangeSpec:
        """What all who send and receive whole units know of them, where one replica has each."""
        shards = tuple(each.shards for each in self.units if each.shards is not None)
        assert len(shards) in (0, len(self.units)), "split for all of them or for none"
        return ExchangeSpec(
            tokens=tuple(each.tokens for each in self.units),
            shares=((Share(encoder_replica=0),),) * len(self.units),
            width=self.width,
            dtype=self.dtype,
            shards=shards or None,
            row_tokens=tuple(each.row_tokens for each in self.units),
        )

    def _rows(self, unit: int) -> int:
        return self.units[unit].rows


def blank_unit(architecture: EncoderArchitecture) -> UnitSize:
    """The smallest unit, which stands in for no media."""
    grid = architecture.blank_grid()
    return UnitSize(grids=(grid,), row_tokens=(architecture.tokens(grid),))


def largest_unit(units: Sequence[UnitSize], *, blank: UnitSize) -> UnitSize:
    """The one with most rows, or ``blank`` media where none of them has any."""
    found = max(units, key=lambda each: each.rows)
    return found if found.grids else replace(blank, shards=found.shards)


def encoded_units(
    chunk: MultimodalModel, model: Any, encoder: str, units: Sequence[UnitSize], *, costs: UnitCosts
) -> EncodedUnits:
    """The ``units`` of a step in ``encoder``; ``chunk`` is the rank's first, with it or without."""
    architecture, config = model.encoder(encoder), chunk.config
    row = architecture.row_values * _INPUT_BYTES
    kept = blank_unit(architecture).rows * row if costs.blank.keeps_input else 0
    return EncodedUnits(
        units=units,
        costs=costs,
        width=(1 + len(architecture.taps())) * config.hidden_size,
        dtype=config.params_dtype,
        row=row,
        blank_input=kept,
    )
