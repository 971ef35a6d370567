"""What a rule is, the forms that most rules have, and sizes that several of them look at."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from loongplug.parallel.layout import Layout

Problems = Iterable[str]
Check = Callable[[Namespace, Any], Problems]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One refusal: when (in words and as a check), why, and what to do instead.

    ``name`` is that of the variable in its file; errors end with it. ``check`` gets Megatron's
    arguments, with the model's architecture and LoongPlug's defaults in place, and the model's
    config. It says nothing where its inputs are missing, and must not communicate. Rules of
    ``training_only`` do not concern a conversion, those with ``verified`` false no run that is held
    against another one in fp32.
    """

    refuses: str
    check: Check
    reason: str
    cure: str
    name: str = ""
    training_only: bool = False
    verified: bool = True

    def __call__(self, args: Namespace, model: Any) -> str | None:
        return ", ".join(self.check(args, model)) or None


def rule(
    *, reason: str, cure: str, refuses: str | None = None, **options: Any
) -> Callable[[Check], Rule]:
    """Make a check a rule, of which the check's docstring says what it refuses."""

    def made(check: Check) -> Rule:
        refused = refuses or " ".join((check.__doc__ or "").split())
        return Rule(refuses=refused, check=check, reason=reason, cure=cure, **options)

    return made


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What flags ask for, as an error says it ("" where they do not) and as the docs do."""

    said: Callable[[Namespace], str]
    in_docs: str


def excludes(one: Choice, other: Choice, *, refuses: str | None = None, **texts: Any) -> Rule:
    def check(args: Namespace, model: Any) -> Problems:
        first, second = one.said(args), other.said(args)
        if first and second:
            yield f"{first} with {second}"

    return rule(refuses=refuses or f"{one.in_docs} with {other.in_docs}", **texts)(check)


def needs(one: Choice, other: Choice, **options: Any) -> Rule:
    """The rule that one choice needs another."""

    def check(args: Namespace, model: Any) -> Problems:
        first = one.said(args)
        if first and not other.said(args):
            yield f"{first} without {other.in_docs.replace('`', '')}"

    return rule(refuses=f"{one.in_docs} without {other.in_docs}", **options)(check)


def indivisible(sizes: Mapping[str, int], *, by: str, ranks: int) -> Problems:
    """Which of ``sizes`` cannot be split over ``ranks``, which are called ``by``."""
    for what, size in sizes.items():
        if ranks > 0 and size % ranks:
            yield f"{what} {size} does not divide by {by} {ranks}"


def flag(text: str, *, argument: str | None = None) -> Choice:
    """A switch, such as ``--packing``, or a flag with its value, such as ``--optimizer sgd``.

    ``argument`` is its name in the arguments, where that is another.
    """
    name, _, value = text.partition(" ")

    def said(args: Namespace) -> str:
        given = value_of(args, argument or name)
        asked = given == value if value else given is not False and given not in (None, "", [])
        return text if asked else ""

    return Choice(said=said, in_docs=f"`{text}`")


def number(name: str, *, above: int) -> Choice:
    def said(args: Namespace) -> str:
        given = value_of(args, name)
        return f"{name} {given}" if given is not None and given > above else ""

    return Choice(said=said, in_docs=f"`{name}` above {above}")


def among(name: str, values: Sequence[str]) -> Choice:
    """Those of ``values`` that a flag of several has, such as ``--recompute-modules moe``."""

    def said(args: Namespace) -> str:
        found = [value for value in value_of(args, name) or () if value in values]
        return f"{name} {' '.join(found)}" if found else ""

    return Choice(said=said, in_docs=", ".join(f"`{value}`" for value in values))


def any_of(*choices: Choice, joined: str = ", ") -> Choice:
    """One of several, or more."""
    return Choice(
        said=lambda args: joined.join(filter(None, (each.said(args) for each in choices))),
        in_docs=", ".join(each.in_docs for each in choices),
    )


FUSED_ACCUMULATION = Choice(
    said=lambda args: (
        "Megatron's fused gradient accumulation" if args.gradient_accumulation_fusion else ""
    ),
    in_docs="fused gradient accumulation (on with Apex)",
)
LOCAL_LAYERS = Choice(
    said=lambda args: (
        ""
        if args.transformer_impl == "transformer_engine"
        else f"--transformer-impl {args.transformer_impl}"
    ),
    in_docs="no TransformerEngine",
)


def value_of(args: Namespace, flag: str) -> Any:
    """What was given for a flag, or is its default; None where these arguments do not have it."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"), None)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def rules_of(module: ModuleType) -> tuple[Rule, ...]:
    """The rules of a file, in its order. A file that asks another's rule imports that file."""
    return tuple(
        replace(each, name=name.replace("_", "-"))
        for name, each in vars(module).items()
        if isinstance(each, Rule)
    )


def modules_of(model: Any) -> Iterator[tuple[str, Any]]:
    """The settings of each module, with the key that users write, such as ``model.foundation``."""
    for name, settings in model.modules().items():
        yield f"model.{model.keys[name]}", settings


def encoders_of(model: Any) -> Iterator[tuple[str, Any]]:
    """The settings of each encoder, with the key that users write."""
    for name in model.encoders:
        yield f"model.{model.keys[name]}", model.encoder(name)


def evaluates(args: Namespace) -> bool:
    return bool(args.valid_data_path) or args.valid_share is not None


def model_parallel_size(args: Namespace) -> int:
    size: int = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    return size


def ranks_apart(model: Any) -> int:
    """The ranks of encoders that the decoder has not."""
    return sum(
        (each.tensor_model_parallel_size or 1)
        * each.data_parallel_size
        * each.pipeline_model_parallel_size
        for _, each in encoders_of(model)
        if each.rank_offset is not None
    )


def decoder_layout_of(args: Namespace) -> Layout:
    """The decoder's layout, whose ranks are ``world_size``; ValueError where it cannot be."""
    return Layout(
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=data_parallel_size(args),
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or 0,
    )


def data_parallel_size(args: Namespace) -> int:
    """Replicas of the model, or 0 where the layout does not fit the world."""
    layout = model_parallel_size(args)
    fits = layout > 0 and args.world_size > 0 and args.world_size % layout == 0
    return args.world_size // layout if fits else 0
