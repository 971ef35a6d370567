"""From a command line to arguments that megatron.training takes and a model config."""

import contextlib
import io
import traceback
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loongplug.checkpoint.settings_notes import drops_transparency
from loongplug.hetero.modes import is_schedule_open, may_fill_bubbles, settle_bubbles
from loongplug.models.family import Family
from loongplug.models.lora import adapts_experts
from loongplug.models.parts import ArchitectureArgument
from loongplug.parallel.rendezvous import this_rank
from loongplug.platform.active import DeviceName
from loongplug.schedule.tensor_names import RECOMPUTED
from loongplug.training.config import compose_asked_for, to_yaml_data
from loongplug.training.defaults import MEGATRON_TOKENIZER, apply_defaults
from loongplug.training.flags import CommandLine, read_command_line
from loongplug.training.rules import streaming, violated_rules
from loongplug.training.rules.hetero import full_separation
from loongplug.training.rules.rule import data_parallel_size, ranks_apart, rules_of
from loongplug.training.special_tokens import read_tokenizer, with_token_ids
from loongplug.training.step_sizes import settle_step_sizes


@dataclass(frozen=True, kw_only=True)
class ParsedArguments:
    """A checked command line.

    ``args`` is what ``megatron.training.global_vars.set_global_variables`` takes; ``model`` the
    family's config with its token ids filled in, ``model_yaml`` the data that gives it again;
    ``options`` are all flags by their names in ``args``, ``overrides`` those of the command line.
    """

    args: Namespace
    model: Any
    family: Family
    model_yaml: dict[str, Any]
    options: Mapping[str, str]
    overrides: tuple[str, ...]


def parse_arguments(
    argv: Sequence[str],
    *,
    training: bool = True,
    verified: bool = False,
    target: DeviceName | None = None,
) -> ParsedArguments:
    """Parse and check ``argv`` (without the program's name) for this rank.

    Activates the platform that ``--device`` asks for. RANK and WORLD_SIZE come from the
    environment as torchrun sets them; nothing is communicated, and every rank comes to the same
    answer. Megatron's global variables are left for the caller to set. Without ``training``, what
    only a run that trains needs is not asked for; a run that is ``verified`` may be in fp32 where
    others may not. ``target`` is the device that the run is for, where it is not this one.
    ValueError has every problem found, a line each.
    """
    from loongplug.platform import activate, requested_device

    platform = activate(requested_device(argv))
    from loongplug.platform.upstream import apply_upstream_replacements

    apply_upstream_replacements(platform)  # Megatron's checks ask for the device, too
    line = read_command_line(argv)
    args = line.args
    composed = compose_asked_for(args, overrides=line.overrides, converts=not training)
    if not training:  # whatever is done with the model, its modules lie together
        composed = replace(composed, config=composed.config.beside_the_decoder())
    complete(args, device=platform.name, target=target)
    # To Megatron, and to the rules, the decoder's ranks are all there are.
    args.world_size -= ranks_apart(composed.config)
    args.own_ranks = []
    for name in composed.config.encoders:
        if (one := composed.config.encoder(name)).rank_offset is not None:
            tp, pp = one.tensor_model_parallel_size or 1, one.pipeline_model_parallel_size
            args.own_ranks.append((name, one.rank_offset, tp, pp))
    if args.print_config:
        if args.rank == 0:
            print(composed.to_yaml(), end="", flush=True)
        raise SystemExit(0)

    architecture = composed.family.megatron_arguments(composed.config)
    problems = _contradictions(line, architecture)
    for name, argument in architecture.items():
        setattr(args, name, argument.value)

    def completed() -> list[str]:
        """Set the defaults; what stands against a run with these arguments."""
        apply_defaults(
            args,
            given=line.flags,
            backend=platform.backend,
            adapted_experts=adapts_experts(composed.config),
        )
        return violated_rules(args, composed.config, training=training, verified=verified)

    problems += completed()
    if not problems and training and args.epochs is not None:
        from loongplug.training.rows import iterations_of_epochs  # it imports transformers

        # Megatron goes by a run's length in iterations.
        args.train_iters, args.epochs = iterations_of_epochs(args, composed.config), None
        problems += completed()  # some of it goes by the number of iterations
    if problems:
        raise ValueError("\n".join(problems))

    settle_schedule(args, composed.config)
    settle_transparency(args)
    args.tokenizer_type = MEGATRON_TOKENIZER
    args.dataloader_type = "external"  # Megatron's word for an iterator of ours, whatever it reads
    settle_step_sizes(args, dp=data_parallel_size(args))
    # Megatron knows its own recompute modules only.
    modules = args.recompute_modules or []
    args.recompute_nodes = tuple(name for name in modules if name in RECOMPUTED)
    if args.recompute_nodes:
        args.recompute_modules = [name for name in modules if name not in RECOMPUTED]
    if args.offload_tensors:
        args.fine_grained_activation_offloading = False  # to Megatron: its own kind of it
    validate_with_megatron(args)
    tokenizer, texts = read_tokenizer(Path(args.tokenizer_model)), composed.family.special_tokens
    model = with_token_ids(composed.config, tokenizer, special_tokens=texts)
    return ParsedArguments(
        args=args,
        model=model,
        family=composed.family,
        model_yaml=to_yaml_data(model),
        options=line.options,
        overrides=line.overrides,
    )


def settle_transparency(args: Namespace) -> None:
    """Say what transparency becomes where no flag does: what it was, if a run goes on."""
    if args.transparency is None:
        old = args.load and not args.finetune and drops_transparency(Path(args.load))
        args.transparency = "drop" if old else "white"
        if old and args.rank == 0:
            said = "says nothing of transparency: images go on as there, --transparency drop"
            print(f"The note of data in {args.load} {said}.", flush=True)


def settle_schedule(args: Namespace, model: Any) -> None:
    """Say of full separation's schedule whether it is streamed; the first rank says why not."""
    wanted, asked = may_fill_bubbles(args), not is_schedule_open(args)
    settle_bubbles(args, filled=False)
    if not wanted or not full_separation(args, model):
        return
    why, silent = _why_separated(args, model, asked=asked)
    if not why:
        settle_bubbles(args, filled=True)
    elif args.rank == 0 and not silent:
        print(f"Encoders work before the decoder's schedule and behind it: {why}.", flush=True)


def _why_separated(args: Namespace, model: Any, *, asked: bool) -> tuple[str, bool]:
    """What stands against streaming, and whether to be silent: nobody asked, or nothing is lost."""
    if args.pipeline_model_parallel_size == 1:
        return "a pipeline of one stage has no bubble", not asked
    if not asked and args.target_device == "cuda":
        return "streaming has not been measured on GPUs, and waits to be asked for", True
    tried = Namespace(**vars(args))
    settle_bubbles(tried, filled=True)
    found = ((each, each(tried, model)) for each in rules_of(streaming))
    return next((f"{wrong}: {each.reason}" for each, wrong in found if wrong), ""), False


def complete(args: Namespace, *, device: str, target: str | None = None) -> None:
    """Add what is known beside the flags: both devices, and what Megatron's parse_args adds."""
    from megatron.core.msc_utils import MultiStorageClientFeature

    args.device, args.target_device = device, target or device
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.rank, args.ranks = this_rank()
    args.world_size = args.ranks
    MultiStorageClientFeature.disable()
    args.multi_turn = args.multi_turn or ("split" if args.packing else "last")


def _contradictions(
    line: CommandLine, architecture: Mapping[str, ArchitectureArgument]
) -> list[str]:
    problems = []
    for name, argument in architecture.items():
        given = getattr(line.args, name)
        if name not in line.flags or given == argument.value:
            continue
        values = "" if isinstance(given, bool) else f" ({given}, not {argument.value})"
        cure = f"its YAML decides; use the override model.{argument.key}=... instead"
        if argument.key is None:
            cure = "this is fixed for its family; drop the flag"
        problems.append(f"{line.flags[name]} contradicts the model{values}: {cure}")
    return problems


def validate_with_megatron(args: Namespace) -> None:
    """Megatron's own checks, without its listing of all arguments, as ValueError."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import validate_args

    from loongplug.models.decoder import DecoderConfig

    delayed = args.delay_wgrad_compute
    with _refusing():
        # Of local linears Megatron knows no such ones.
        args.delay_wgrad_compute = delayed and args.transformer_impl == "transformer_engine"
        validate_args(args)
        args.delay_wgrad_compute = delayed
        core_transformer_config_from_args(args, DecoderConfig)  # for the checks it makes


def validate_optimizer(args: Namespace) -> None:
    """As :func:`validate_with_megatron`, of the optimizer, which Megatron would check too late."""
    from megatron.training.training import get_megatron_optimizer_config

    with _refusing():
        get_megatron_optimizer_config(args)


@contextmanager
def _refusing() -> Iterator[None]:
    """What Megatron asserts, raises or prints before it exits inside, as ValueError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    except (AssertionError, RuntimeError, ValueError) as error:
        # Some of its assertions have no text; the line itself then says most.
        asserted = traceback.extract_tb(error.__traceback__)[-1].line
        raise ValueError(
            f"Megatron-Core refuses the arguments: {str(error) or asserted}"
        ) from error
    except SystemExit as error:
        last = said.getvalue().strip().rpartition("\n")[2]
        raise ValueError(f"Megatron-Core refuses the arguments: {last}") from error
