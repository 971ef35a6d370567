"""What a drawn placement is: sizes of a decoder and of encoders on ranks of their own. Pure.

As of whole runs (``draws.py``), ``placement_drawn`` makes one out of choices, and a draw is written
and read as one line of JSON.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from math import prod
from random import Random
from typing import Any, Self

Choose = Callable[[Sequence[Any]], Any]  # one of them

MEDIA = ("some", "many", "uneven", "lone", "none")  # tokens of samples
_MOST_TP = 4  # each of which divides the length of a sequence
_STEPS = ((True,), (True, True), (True, False, True))  # whether each trains


@dataclass(frozen=True, kw_only=True)
class DrawnEncoder:
    """One encoder; its first rank lies behind those of the modules before it.

    ``trains`` has, for each of its pipeline stages, whether the stage's own parameters do.
    """

    tp: int = 1
    dp: int = 1
    trains: tuple[bool, ...] = (True,)

    @property
    def pp(self) -> int:
        """Its pipeline parallel size."""
        return len(self.trains)

    @property
    def ranks(self) -> int:
        """How many are its own."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class DrawnPlacement:
    """A few steps of a decoder whose encoders all lie apart.

    ``group`` are the microbatches of one chunk in a row, where there are virtual stages.
    """

    encoders: tuple[DrawnEncoder, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    group: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1
    microbatches: int = 4
    media: str = "some"
    decoder_trains: bool = True
    steps: tuple[bool, ...] = (True,)
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Those of all modules."""
        return self.tp * self.pp * self.dp + sum(each.ranks for each in self.encoders)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse."""
        data = json.loads(text)
        encoders = tuple(
            DrawnEncoder(**each | {"trains": tuple(each["trains"])})
            for each in data.pop("encoders")
        )
        return cls(**data | {"encoders": encoders, "steps": tuple(data["steps"])})


def drawn_placements(number: int, *, seed: int) -> dict[int, list[DrawnPlacement]]:
    """So many, by the ranks that they have at most: every tenth may have six."""
    found: dict[int, list[DrawnPlacement]] = {4: [], 6: []}
    for each in range(number):
        most = 6 if each % 10 == 9 else 4
        found[most].append(placement_drawn(Random(f"{seed} {each}").choice, most=most))
    return {most: draws for most, draws in found.items() if draws}


def placement_drawn(choose: Choose, *, most: int) -> DrawnPlacement:
    """A placement on at most so many ranks. The simplest options come first."""
    (tp, pp, dp), encoders = choose(_worlds(most, choose((1, 1, 2) if most > 2 else (1,))))
    vpp = choose((1, 2, 3)) if pp > 1 else 1
    group = choose((pp, pp + 1, 2 * pp)) if vpp > 1 else 1
    microbatches = group * choose((1, 2, 3)) if vpp > 1 else choose((4, 1, 2, 3, 5, 8))
    trains = [tuple(choose((True, True, False)) for _ in range(of_pp)) for _, of_pp, _ in encoders]
    return DrawnPlacement(
        encoders=tuple(
            DrawnEncoder(tp=of_tp, dp=of_dp, trains=each)
            for (of_tp, _, of_dp), each in zip(encoders, trains, strict=True)
        ),
        tp=tp,
        pp=pp,
        dp=dp,
        vpp=vpp,
        group=group,
        sequence_parallel=tp > 1 and choose((True, False)),
        micro_batch=choose((1, 2, 3, 4)),
        microbatches=microbatches,
        media=choose(MEDIA),
        decoder_trains=not any(map(any, trains)) or choose((True, True, False)),
        steps=choose(_STEPS),
        seed=choose(range(1000)),
    )


Sizes = tuple[int, ...]  # TP, PP and DP


@cache
def _worlds(most: int, encoders: int) -> list[tuple[Sizes, tuple[Sizes, ...]]]:
    """Sizes of a decoder with those of so many encoders, that fit ``most`` ranks."""
    sizes = [each for each in product(range(1, most), repeat=3) if prod(each) < most]
    return [
        (decoder, own)
        for decoder in sizes
        for own in product(sizes, repeat=encoders)
        if decoder[0] <= _MOST_TP and prod(decoder) + sum(map(prod, own)) <= most
    ]
