"""Tables of ``bench.py pipeline``: which mode wins when, and two published schedules."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

from modes.pipeline import measure
from modes.pipeline_clock import predicted
from modes.pipeline_figures import CaseFigures, print_cases
from modes.pipeline_work import Case, PacedEncoder
from published_partitions import MICROBATCHES, TABLE_3, Row, Timed

from loongplug.consoles import table_console
from loongplug.partition.clock import StageTime

_TP: Final = 2
_UNIT: Final = 40.0  # ms of a decoder stage's forward; its backward takes twice as long
_SLOT: Final = 400.0  # ms of a step for each microbatch in the table of modes, whatever the mode
_LAYERS: Final = 4  # of a decoder stage, where layers are split evenly
_TUNED: Final = "uniform tuned"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``share`` is the encoder's of all work; the decoder has ``pp`` stages of TP2."""

    pp: int
    microbatches: int
    share: float

    @property
    def encoder(self) -> StageTime:
        """Of a microbatch's media on one rank."""
        return _stage(self.share / (1 - self.share) * _TP * self.pp)

    def cases(self) -> dict[str, Case]:
        """Of all modes on as many ranks, by name."""
        even = self._case("uniform", stages=(_stage(1.0),) * self.pp)
        found = {
            "uniform": even,
            _TUNED: min(map(self._split, range(1, _LAYERS + 1)), key=predicted),
        }
        for mode in ("encoder_hetero_dp", "full_hetero_dp", "streamed"):
            found[mode] = self._case(mode, stages=even.stages)
        found["own_ranks"] = min(map(self._apart, range(1, self.pp)), key=predicted)
        return {name: _slowed(case) for name, case in found.items()}

    def _split(self, first: int) -> Case:
        """The first stage has so many layers, and the others share what is left."""
        left = (_LAYERS * self.pp - first) / (self.pp - 1)
        stages = [_stage(first / _LAYERS), *[_stage(left / _LAYERS)] * (self.pp - 1)]
        return self._case("uniform", stages=tuple(stages))

    def _apart(self, without: int) -> Case:
        """The encoder has the ranks of so many stages, and replicas of one rank each."""
        stages = self.pp - without
        return self._case(
            "own_ranks", stages=(_stage(self.pp / stages),) * stages, replicas=_TP * without
        )

    def _case(self, mode: str, *, stages: tuple[StageTime, ...], replicas: int = 1) -> Case:
        encoder = PacedEncoder(name="encoder", time=self.encoder, replicas=replicas)
        return Case(
            mode=mode,
            stages=stages,
            encoders=(encoder,),
            microbatches=self.microbatches,
            tp=_TP,
        )


def _stage(times: float) -> StageTime:
    return StageTime(forward=times * _UNIT, backward=times * 2 * _UNIT)


def _slowed(case: Case) -> Case:
    """The case with all times in one proportion, such that ranks that wake late cost all alike."""
    times = _SLOT * case.microbatches / predicted(case)
    return replace(
        case,
        stages=tuple(_times(each, times) for each in case.stages),
        encoders=tuple(replace(each, time=_times(each.time, times)) for each in case.encoders),
    )


def _times(time: StageTime, factor: float) -> StageTime:
    return StageTime(forward=time.forward * factor, backward=time.backward * factor)


SETTINGS: Final = tuple(
    Setting(pp=pp, microbatches=microbatches, share=share)
    for pp, microbatches, share in product((2, 4, 8), (8, 32), (0.1, 0.3, 0.5))
)


def modes_table(*, steps: int, json_path: Path | None) -> None:
    """Every mode in every setting: times what a step takes if all ranks have the same to do.

    Printed is ``docs/which_mode.csv``, of which ``pages.pictures`` draws the page's picture; cases
    of one number of stages when they are done. What a machine does beside only makes steps longer,
    so that the shortest one of each case stands for it.
    """
    print("stages,microbatches,encoder,mode,step,over_clock", flush=True)
    done: list[tuple[str, CaseFigures]] = []
    for pp in sorted({setting.pp for setting in SETTINGS}):
        named = [
            (setting, name, case)
            for setting in SETTINGS
            if setting.pp == pp
            for name, case in setting.cases().items()
        ]
        figures = measure([case for _, _, case in named], steps=steps)
        for (setting, name, _), each in zip(named, figures, strict=True):
            done.append((f"{setting} {name}", each))
            print(_csv_row(setting, name, each), flush=True)
        _write(json_path, done)


def _csv_row(setting: Setting, name: str, each: CaseFigures) -> str:
    step, even = min(each.step), sum(each.work) / len(each.work)
    place = f"{setting.pp},{setting.microbatches},{setting.share:.0%}"
    return f"{place},{name},{step / even:.2f},{step / each.predicted:.2f}"


def published_table(*, steps: int, json_path: Path | None) -> None:
    """Cornstarch's table 3: rates per GPU, the frozen-aware split over the other one.

    The encoder's stages stand in a row before the decoder's: its ranks are a pipeline of 1F1B. The
    shortest of the steps counts, as in the table of modes.
    """
    named = [
        (f"{name} {split}", case)
        for name, row in TABLE_3.items()
        for split, case in zip(("aware", "unaware"), _splits(row), strict=True)
    ]
    figures = measure([case for _, case in named], steps=steps)
    found = {name: each for (name, _), each in zip(named, figures, strict=True)}
    print("| model | ranks | ms a step | over the clock | gain | by the clock | published |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, row in TABLE_3.items():
        both = [found[f"{name} {split}"] for split in ("aware", "unaware")]
        shown = [
            name,
            ", ".join(str(each.case.ranks) for each in both),
            ", ".join(f"{min(each.step):,.0f}" for each in both),
            ", ".join(f"{min(each.step) / predicted(each.case):.2f}" for each in both),
            f"{_gain(both, lambda each: min(each.step)):.2f}",
            f"{_gain(both, lambda each: predicted(each.case)):.2f}",
            f"{row.aware.rate / row.unaware.rate:.2f}",
        ]
        print(f"| {' | '.join(shown)} |")
    _write(json_path, list(found.items()))


def _splits(row: Row) -> tuple[Case, Case]:
    def case(timed: Timed, stages: tuple[int, int]) -> Case:
        encoder, decoder = (
            StageTime(forward=times[0], backward=times[1])
            for times in (timed.encoder, timed.decoder)
        )
        return Case(
            mode="uniform",
            stages=(encoder,) * stages[0] + (decoder,) * stages[1],
            microbatches=MICROBATCHES,
        )

    return case(row.aware, row.stages), case(row.unaware, row.inferred())


def _gain(both: Sequence[CaseFigures], step: Callable[[CaseFigures], float]) -> float:
    aware, unaware = (step(each) * each.case.ranks for each in both)
    return unaware / aware


def figure_4a_table(*, steps: int, json_path: Path | None) -> None:
    """Six ranks of MIMO's figure 4(a), two encoders and a decoder of three stages.

    There the first encoder has two stages, here two replicas. The other modes have the same work on
    as many ranks.
    """
    unit = 2.0
    encoders = (
        PacedEncoder(name="encoder_1", time=_stage(2 * unit), replicas=2),
        PacedEncoder(name="encoder_2", time=_stage(unit)),
    )
    cases = [
        Case(
            mode="own_ranks",
            stages=(_stage(unit),) * 3,
            encoders=encoders,
            microbatches=MICROBATCHES,
        ),
        *(
            Case(
                mode=mode,
                stages=(_stage(unit / 2),) * 6,
                encoders=encoders,
                microbatches=MICROBATCHES,
            )
            for mode in ("uniform", "full_hetero_dp")
        ),
    ]
    found = measure(cases, steps=steps)
    print_cases(found, console=table_console(least=132))
    _write(json_path, [(each.case.mode, each) for each in found])


TABLES: Final[Mapping[str, Callable[..., None]]] = {
    "modes": modes_table,
    "published": published_table,
    "figure-4a": figure_4a_table,
}


def _write(path: Path | None, found: Sequence[tuple[str, CaseFigures]]) -> None:
    if path is None:
        return
    content = {
        name: {
            "step": each.step,
            "empty": each.empty,
            "predicted": each.predicted,
            "over_busiest": each.over_busiest,
            "over_even": each.over_even,
            "bubbles": each.bubbles,
        }
        for name, each in found
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
