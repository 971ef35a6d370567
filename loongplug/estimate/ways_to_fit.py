"""What could be changed in a run that does not fit, the cheapest first, and what makes it fit."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from loongplug.hetero.modes import mode_of
from loongplug.training.arguments import ParsedArguments
from loongplug.training.flags import without_flags

ENOUGH = 3  # ways to choose among
SECONDS = 120.0  # of processor time; after so many no further estimate begins
_ONE_NODE = 8  # ranks of a tensor parallel group talk in every layer
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_FULL_RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
_RECOMPUTE = frozenset(
    f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """``flags`` in the place of those named ``drops`` in args.

    Of each ``kind`` a run has one change: a later one takes an earlier one's place.
    """

    kind: str
    flags: tuple[str, ...]
    drops: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return " ".join(self.flags)


@dataclass(frozen=True, kw_only=True)
class Way:
    """Changes, all at once, and the bytes that the fullest rank needs with them."""

    changes: tuple[Change, ...]
    needs: int

    def __str__(self) -> str:
        return " ".join(map(str, self.changes))


@dataclass(frozen=True, kw_only=True)
class Found:
    """``ways`` that fit, the cheapest first; else ``least`` is the one that needs least.

    ``tried`` counts what could be estimated; ``in_time`` is false where the time was too short to
    try all.
    """

    ways: tuple[Way, ...]
    least: Way | None
    tried: int
    in_time: bool


def ways_to_fit(
    changes: Sequence[Change],
    *,
    needs: int,
    estimate: Callable[[Sequence[Change]], int | None],
    fits: Callable[[int], bool],
    clock: Callable[[], float] = time.process_time,
) -> Found:
    """Changes to a run that ``needs`` so many bytes: several together, then single ones.

    ``changes`` are the cheapest first. ``estimate`` gives what the fullest rank needs with some of
    them, None where they are refused; ``fits`` says whether so many bytes do.
    """
    known: dict[tuple[Change, ...], Way | None] = {}
    until, in_time = clock() + SECONDS, True

    def tried(*some: Change) -> Way | None:
        nonlocal in_time
        if some not in known:
            if clock() > until:
                in_time = False
                return None
            nbytes = estimate(some)
            known[some] = None if nbytes is None else Way(changes=some, needs=nbytes)
        return known[some]

    best = Way(changes=(), needs=needs)
    for change in changes:
        way = tried(*(each for each in best.changes if each.kind != change.kind), change)
        if way is not None and way.needs < best.needs:
            best = way
        if fits(best.needs):
            break
    ways = []
    if fits(best.needs):
        for change in reversed(best.changes[:-1]):  # it did not fit before the last one
            fewer = tried(*(each for each in best.changes if each is not change))
            if fewer is not None and fits(fewer.needs):
                best = fewer
        # What is not enough with all that is cheaper is not enough alone.
        singles = map(tried, changes[changes.index(best.changes[-1]) :])
        fitting = (way for way in singles if way is not None and fits(way.needs) and way != best)
        ways = [best, *islice(fitting, ENOUGH - 1)]
    estimated = [way for way in known.values() if way is not None]
    return Found(
        ways=tuple(ways),
        least=min(estimated, key=lambda way: way.needs, default=None),
        tried=len(estimated),
        in_time=in_time,
    )


def changed(flags: Sequence[str], changes: Sequence[Change]) -> list[str]:
    """``flags`` with all the changes."""
    drops = frozenset[str]().union(*(each.drops for each in changes))
    return [*without_flags(flags, drops), *(flag for each in changes for flag in each.flags)]


def changes_of(parsed: ParsedArguments) -> Iterator[Change]:
    """What this run does not do yet, the one that costs it least time first.

    Whether a start would take one, and what it is good for, is not known here.
    """
    args, model = parsed.args, parsed.model
    encoders = {name: model.encoder(name) for name in model.encoders}
    modes = [mode_of(args, encoder) for encoder in encoders.values()]
    # Where things lie, and smaller microbatches.
    if not args.use_distributed_optimizer:
        yield _switch("--use-distributed-optimizer")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield _switch("--sequence-parallel", kind=_TP)
    if not any(mode.around_schedule for mode in modes):
        if args.pipeline_model_parallel_size > 1:
            yield _switch("--enable-full-hetero-dp")
        elif args.tensor_model_parallel_size > 1:
            yield _switch("--enable-encoder-hetero-dp")
    size = args.micro_batch_size // 2
    while size:
        flags = ("--micro-batch-size", str(size))
        yield Change(kind="microbatch", flags=flags, drops=frozenset(("micro_batch_size",)))
        size //= 2
    # Offloads of full separation, which travel beside the computation.
    if any(mode.on_every_stage for mode in modes):
        for name in (
            "full_hetero_dp_cpu_offload",
            "offload_encoder_state",
            "offload_encoder_activations",
        ):
            if not getattr(args, name):
                yield _switch(f"--{name.replace('_', '-')}")
    # Forwards that are computed twice: of the encoder, of the decoder, of both.
    twice = tuple(
        f"model.{model.keys[name]}.recompute=true"
        for name, encoder in encoders.items()
        if not encoder.recompute
    )
    if twice:
        yield Change(kind="recompute", flags=twice)
    if args.recompute_granularity != "full":
        yield Change(kind="recompute", flags=_FULL_RECOMPUTE, drops=_RECOMPUTE)
        if twice:
            yield Change(kind="recompute", flags=(*_FULL_RECOMPUTE, *twice), drops=_RECOMPUTE)
    # More ranks to each replica.
    split = () if args.sequence_parallel else ("--sequence-parallel",)
    for kind, most, more in ((_TP, _ONE_NODE, split), (_PP, args.world_size, ())):
        name = kind.removeprefix("--").replace("-", "_")
        size = 2 * getattr(args, name)
        while size <= min(most, args.world_size):
            yield Change(kind=kind, flags=(kind, str(size), *more), drops=frozenset((name,)))
            size *= 2


def _switch(flag: str, *, kind: str | None = None) -> Change:
    return Change(kind=kind or flag, flags=(flag,))
