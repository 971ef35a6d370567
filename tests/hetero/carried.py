"""Carriers of ranks over groups of all of them, and how much goes over these."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from loongplug.hetero.operations import Cargo
from loongplug.hetero.piece_carrier import Carrier, Dealer
from loongplug.hetero.wire import Wire
from loongplug.parallel.exchange_groups import create_exchange_group
from loongplug.parallel.layout import Layout

WIDTH, LENGTH = 3, 8
MICROBATCHES, STEPS, AHEAD = 5, 2, 2
LATE = 0.02  # seconds; what is sent at once is there long before
ROW_BYTES = WIDTH * torch.float32.itemsize


@dataclass
class Counted:
    """Bytes that this rank sends, by the group, and that groups deal beside that.

    ``late``: it takes its time with each message.
    """

    late: bool
    groups: list[Any] = field(default_factory=list)
    there: int = 0
    back: int = 0
    dealt: int = 0

    def watch(self) -> None:
        isend, exchange, broadcast = dist.isend, dist.all_to_all_single, dist.broadcast

        def sending(tensor: torch.Tensor, *, dst: int, group: Any) -> Any:
            if self.late:
                time.sleep(LATE)
            if group is self.groups[0]:
                self.there += tensor.nbytes
            else:
                assert group is self.groups[1]
                self.back += tensor.nbytes
            return isend(tensor, dst=dst, group=group)

        def exchanging(rows: torch.Tensor, out: torch.Tensor, *args: Any) -> Any:
            self.dealt += out.nbytes
            return exchange(rows, out, *args)

        def sharing(tensor: torch.Tensor, **of: Any) -> Any:
            self.dealt += tensor.nbytes
            return broadcast(tensor, **of)

        dist.isend, dist.all_to_all_single, dist.broadcast = sending, exchanging, sharing


def carrier_of(
    everyone: Sequence[int],
    decoder: Layout,
    encoder: Layout,
    counted: Counted,
    *,
    most: float,
) -> Carrier:
    """Of this rank, over groups of all ranks."""
    there, back = (
        create_exchange_group(name, [list(everyone)], options_of="pp") for name in ("there", "back")
    )
    counted.groups[:] = [there, back]
    counted.watch()
    dealers = [
        None if group is None else Dealer(group)
        for group in (
            create_exchange_group("deals", decoder.groups("tp"), options_of="tp"),
            create_exchange_group("shares", encoder.groups("tp"), options_of="tp"),
        )
    ]
    return Carrier(
        wire=Wire(
            {Cargo.FEATURES: there, Cargo.GRADIENTS: back}, most=most, device=torch.device("cpu")
        ),
        deals=dealers[0],
        shares=dealers[1],
        crossings=lambda *_: None,  # they are given to its steps
    )
