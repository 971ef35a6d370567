"""What could be changed in a run that does not fit, the cheapest first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loongplug.hetero.modes import mode_of
from loongplug.training.arguments import ParsedArguments

_ONE_NODE = 8  # ranks of a tensor parallel group talk in every layer
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_FULL_RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
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


def changed(flags: Sequence[str], changes: Sequence[Change]) -> list[str]:
    """``flags`` with all the changes; imports ``megatron.training``."""
    from loongplug.training.flags import without_flags

    drops = frozenset[str]().union(*(each.drops for each in changes))
    return [*without_flags(flags, drops), *(flag for each in changes for flag in each.flags)]


def changes_of(parsed: ParsedArguments) -> list[Change]:
    """What this run does not do yet, the one that costs it least time first.

    Whether a start would take one, and what it is good for, is not known here.
    """
    return [*_free(parsed), *_copies(parsed), *_recompute(parsed), *_layouts(parsed)]


def _free(parsed: ParsedArguments) -> Iterator[Change]:
    """Those that only change where things lie, and smaller microbatches."""
    args = parsed.args
    if not args.use_distributed_optimizer:
        yield _switch("--use-distributed-optimizer")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield _switch("--sequence-parallel", kind=_TP)
    encoders = [parsed.model.encoder(name) for name in parsed.model.encoders]
    modes = [mode_of(args, each) for each in encoders]
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


def _copies(parsed: ParsedArguments) -> Iterator[Change]:
    """Offloads of full separation, which travel beside the computation."""
    args = parsed.args
    encoders = [parsed.model.encoder(name) for name in parsed.model.encoders]
    if not any(mode_of(args, each).on_every_stage for each in encoders):
        return
    for name in (
        "full_hetero_dp_cpu_offload",
        "offload_encoder_state",
        "offload_encoder_activations",
    ):
        if not getattr(args, name):
            yield _switch(f"--{name.replace('_', '-')}")


def _recompute(parsed: ParsedArguments) -> Iterator[Change]:
    """Forwards that are computed twice: of the encoder, of the decoder, of both."""
    model = parsed.model
    encoder = tuple(
        f"model.{model.keys[name]}.recompute=true"
        for name in model.encoders
        if not model.encoder(name).recompute
    )
    decoder = () if parsed.args.recompute_granularity == "full" else _FULL_RECOMPUTE
    drops = frozenset(
        f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")
    )
    if encoder:
        yield Change(kind="recompute", flags=encoder)
    if decoder:
        yield Change(kind="recompute", flags=decoder, drops=drops)
    if encoder and decoder:
        yield Change(kind="recompute", flags=(*decoder, *encoder), drops=drops)


def _layouts(parsed: ParsedArguments) -> Iterator[Change]:
    """More ranks to each replica."""
    args = parsed.args
    split = () if args.sequence_parallel else ("--sequence-parallel",)
    for kind, most, more in ((_TP, _ONE_NODE, split), (_PP, args.world_size, ())):
        name = kind.removeprefix("--").replace("-", "_")
        size = 2 * getattr(args, name)
        while size <= min(most, args.world_size):
            yield Change(kind=kind, flags=(kind, str(size), *more), drops=frozenset((name,)))
            size *= 2


def _switch(flag: str, *, kind: str | None = None) -> Change:
    return Change(kind=kind or flag, flags=(flag,))
