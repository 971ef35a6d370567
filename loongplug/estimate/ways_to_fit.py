"""What could be changed in a run that does not fit, the cheapest first, and what makes it fit."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from loongplug.hetero.modes import mode_of
from loongplug.training.arguments import ParsedArguments

ENOUGH = 3  # ways to choose among
SECONDS = 120.0  # of processor time; after so many no further estimate begins
_ONE_NODE = 8  # ranks of a tensor parallel group talk in every layer
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


class Change(NamedTuple):
    """More ``flags``, which count where a run has them already.

    Of each ``kind`` a run has one change: a later one takes an earlier one's place.
    """

    kind: str
    flags: str


# Changes, all at once, and the bytes that the fullest rank needs with them.
Way = tuple[tuple[Change, ...], int]


class Found(NamedTuple):
    """``ways`` that fit, the cheapest first, and the one that needs ``least`` of those ``tried``.

    ``in_time`` is false where the time was too short to try all.
    """

    ways: list[Way]
    least: Way | None
    tried: int
    in_time: bool


def ways_to_fit(
    changes: Sequence[Change],
    *,
    needs: int,
    estimate: Callable[[str], int | None],
    fits: Callable[[int], bool],
    clock: Callable[[], float] = time.process_time,
) -> Found:
    """Changes to a run that ``needs`` so many bytes: several together, then single ones.

    ``changes`` are the cheapest first. ``estimate`` gives what the fullest rank needs with some of
    their flags, None where they are refused; ``fits`` says whether so many bytes do.
    """
    known: dict[tuple[Change, ...], Way | None] = {}
    until, in_time = clock() + SECONDS, True

    def tried(*some: Change) -> Way | None:
        nonlocal in_time
        if some not in known:
            if clock() > until:
                in_time = False
                return None
            nbytes = estimate(flags_of(some))
            known[some] = None if nbytes is None else (some, nbytes)
        return known[some]

    best: Way = (), needs
    for change in changes:
        way = tried(*(each for each in best[0] if each.kind != change.kind), change)
        if way is not None and way[1] < best[1]:
            best = way
        if fits(best[1]):
            break
    ways = []
    if fits(best[1]):
        for change in reversed(best[0][:-1]):  # it did not fit before the last one
            fewer = tried(*(each for each in best[0] if each is not change))
            if fewer is not None and fits(fewer[1]):
                best = fewer
        # What is not enough with all that is cheaper is not enough alone.
        singles = map(tried, changes[changes.index(best[0][-1]) :])
        fitting = (way for way in singles if way is not None and fits(way[1]) and way != best)
        ways = [best, *islice(fitting, ENOUGH - 1)]
    estimated = [way for way in known.values() if way is not None]
    least = min(estimated, key=lambda way: way[1], default=None)
    return Found(ways, least, len(estimated), in_time)


def flags_of(changes: Sequence[Change]) -> str:
    return " ".join(each.flags for each in changes)


def changes_of(parsed: ParsedArguments) -> Iterator[Change]:
    """What this run does not do yet, the one that costs it least time first, refused or not."""
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
        yield Change("microbatch", f"--micro-batch-size {size}")
        size //= 2
    # Offloads of full separation, which travel beside the computation.
    if any(mode.on_every_stage for mode in modes):
        for name in (
            "full-hetero-dp-cpu-offload",
            "offload-encoder-state",
            "offload-encoder-activations",
        ):
            if not getattr(args, name.replace("-", "_")):
                yield _switch(f"--{name}")
    # Forwards that are computed twice: of the encoder, of the decoder, of both.
    twice = " ".join(
        f"model.{model.keys[name]}.recompute=true"
        for name, encoder in encoders.items()
        if not encoder.recompute
    )
    if twice:
        yield Change("recompute", twice)
    if args.recompute_granularity != "full":
        yield Change("recompute", _FULL_RECOMPUTE)
        if twice:
            yield Change("recompute", f"{_FULL_RECOMPUTE} {twice}")
    # More ranks to each replica.
    split = "" if args.sequence_parallel else " --sequence-parallel"
    for kind, size, most, more in (
        (_TP, args.tensor_model_parallel_size, _ONE_NODE, split),
        (_PP, args.pipeline_model_parallel_size, args.world_size, ""),
    ):
        while (size := 2 * size) <= min(most, args.world_size):
            yield Change(kind, f"{kind} {size}{more}")


def _switch(flag: str, *, kind: str | None = None) -> Change:
    return Change(kind or flag, flag)
