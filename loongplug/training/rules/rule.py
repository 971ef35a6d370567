"""What a rule is, and the sizes that several of them look at."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

Check = Callable[[Namespace, Any], str | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One refusal: when (in words and as a check), why, and what to do instead.

    ``name`` is that of the variable in its file, and stays the same from version to version; errors
    end with it. ``check`` gets Megatron's arguments, with the model's architecture and LoongPlug's
    defaults in place, and the model's config. It answers what is wrong with the given values, or
    None, also where its inputs are missing: another rule asks for them. It must not communicate:
    every rank evaluates every rule alike. Rules of ``training_only`` do not concern a conversion,
    those with ``verified`` false no run that is held against another one in fp32.
    """

    refuses: str
    check: Check
    reason: str
    cure: str
    name: str = ""
    training_only: bool = False
    verified: bool = True

    def __call__(self, args: Namespace, model: Any) -> str | None:
        """What is wrong, or None."""
        return self.check(args, model)


def rule(
    *,
    reason: str,
    cure: str,
    refuses: str | None = None,
    training_only: bool = False,
    verified: bool = True,
) -> Callable[[Check], Rule]:
    """Make a check a rule: it is called as the check is, and its docstring says what it refuses."""

    def made(check: Check) -> Rule:
        return Rule(
            refuses=refuses or " ".join((check.__doc__ or "").split()),
            check=check,
            reason=reason,
            cure=cure,
            training_only=training_only,
            verified=verified,
        )

    return made


def first_of(model: Any, check: Callable[[Any, str], str | None]) -> str | None:
    """What ``check`` finds wrong with the first of a model's encoders that it minds.

    It gets the encoder's config, and how an error calls the encoder.
    """
    for name in model.encoders:
        who = "the encoder" if len(model.encoders) == 1 else model.keys[name]
        if (wrong := check(model.encoder(name), who)) is not None:
            return wrong
    return None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What flags ask for, as an error says it ("" where they do not) and as the docs do."""

    said: Callable[[Namespace], str]
    in_docs: str


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


def among(name: str, values: Sequence[str]) -> Choice:
    """Those of ``values`` that a flag of several has, such as ``--recompute-modules moe``."""

    def said(args: Namespace) -> str:
        found = [value for value in value_of(args, name) or () if value in values]
        return f"{name} {' '.join(found)}" if found else ""

    return Choice(said=said, in_docs=", ".join(f"`{value}`" for value in values))


def any_of(*choices: Choice, joined: str = ", ", in_docs: str | None = None) -> Choice:
    """One of several, or more."""
    return Choice(
        said=lambda args: joined.join(filter(None, (each.said(args) for each in choices))),
        in_docs=in_docs or " or ".join(each.in_docs for each in choices),
    )


def value_of(args: Namespace, flag: str) -> Any:
    """What was given for a flag, or is its default."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def evaluates(args: Namespace) -> bool:
    """Whether a run has validation data."""
    return bool(args.valid_data_path) or args.valid_share is not None


def flag_of(name: str) -> str:
    """The flag that is ``name`` in the arguments."""
    return f"--{name.replace('_', '-')}"


def excludes(
    one: Choice, other: Choice, *, reason: str, cure: str, refuses: str | None = None
) -> Rule:
    """The rule that two choices do not go together."""

    def check(args: Namespace, model: Any) -> str | None:
        first, second = one.said(args), other.said(args)
        return f"{first} with {second}" if first and second else None

    refuses = refuses or f"{one.in_docs} with {other.in_docs}"
    return Rule(refuses=refuses, check=check, reason=reason, cure=cure)


def rules_of(module: ModuleType) -> tuple[Rule, ...]:
    """The rules of a file, in its order. A file that asks another's rule imports that file."""
    return tuple(
        replace(each, name=name.replace("_", "-"))
        for name, each in vars(module).items()
        if isinstance(each, Rule)
    )


def indivisible(what: str, value: int, *, args: Namespace) -> str | None:
    """``what`` with its ``value`` can be split over the tensor parallel ranks."""
    tp = args.tensor_model_parallel_size
    return f"{what} {value} does not divide by tp {tp}" if tp > 0 and value % tp else None


def model_parallel_size(args: Namespace) -> int:
    """Ranks of one replica of the model."""
    size: int = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    return size


def ranks_apart(model: Any) -> int:
    """The ranks of encoders that the decoder has not."""
    encoders = [model.encoder(name) for name in model.encoders]
    return sum(
        (each.tensor_model_parallel_size or 1)
        * each.data_parallel_size
        * each.pipeline_model_parallel_size
        for each in encoders
        if each.rank_offset is not None
    )


def data_parallel_size(args: Namespace) -> int:
    """Replicas of the model, or 0 where the layout does not fit the world."""
    layout = model_parallel_size(args)
    fits = layout > 0 and args.world_size > 0 and args.world_size % layout == 0
    return args.world_size // layout if fits else 0
