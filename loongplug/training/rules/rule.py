"""What a rule is, and the sizes that several of them look at."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Check = Callable[[Namespace, Any], str | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One refusal: when (in words and as a check), why, and what to do instead.

    ``name`` stays the same from version to version; errors end with it. ``check`` gets Megatron's
    arguments, with the model's architecture and LoongPlug's defaults in place, and the model's
    config. It answers what is wrong with the given values, or None, also where its inputs are
    missing: another rule asks for them. It must not communicate: every rank evaluates every rule
    alike. Rules of ``training_only`` do not concern a conversion, those with ``verified``
    false no run that is held against another one in fp32.
    """

    name: str
    refuses: str
    check: Check
    reason: str
    cure: str
    training_only: bool = False
    verified: bool = True

    def __call__(self, args: Namespace, model: Any) -> str | None:
        """What is wrong, or None."""
        return self.check(args, model)


def rule(
    *,
    reason: str,
    cure: str,
    name: str | None = None,
    refuses: str | None = None,
    training_only: bool = False,
    verified: bool = True,
) -> Callable[[Check], Rule]:
    """Make a check a rule: it is called as the check is, and its docstring says what it refuses."""

    def made(check: Check) -> Rule:
        return Rule(
            name=name or check.__name__.replace("_", "-"),
            refuses=refuses or " ".join((check.__doc__ or "").split()),
            check=check,
            reason=reason,
            cure=cure,
            training_only=training_only,
            verified=verified,
        )

    return made


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What flags ask for: what an error calls it, and whether they do.

    ``in_docs`` is what the docs call it, where that is not the flag that ``said`` is.
    """

    said: str
    asked: Callable[[Namespace], object]
    in_docs: str | None = None


FUSED_ACCUMULATION = Choice(
    said="Megatron's fused gradient accumulation",
    asked=lambda args: args.gradient_accumulation_fusion,
    in_docs="fused gradient accumulation (on with Apex)",
)


def flag(said: str) -> Choice:
    """A switch, such as ``--packing``, or a flag with its value, such as ``--optimizer sgd``."""
    name, _, value = said.removeprefix("--").partition(" ")

    def asked(args: Namespace) -> bool:
        given = getattr(args, name.replace("-", "_"))
        return bool(given == value if value else given)

    return Choice(said=said, asked=asked)


def excludes(one: Choice, other: Choice, *, name: str, reason: str, cure: str) -> Rule:
    """The rule that two choices do not go together."""

    def check(args: Namespace, model: Any) -> str | None:
        both = one.asked(args) and other.asked(args)
        return f"{one.said} with {other.said}" if both else None

    return Rule(
        name=name,
        refuses=" with ".join(each.in_docs or f"`{each.said}`" for each in (one, other)),
        check=check,
        reason=reason,
        cure=cure,
    )


def rules_of(module: ModuleType) -> tuple[Rule, ...]:
    """The rules of a file, in its order. A file that asks another's rule imports that file."""
    return tuple(each for each in vars(module).values() if isinstance(each, Rule))


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


def data_parallel_size(args: Namespace) -> int:
    """Replicas of the model, or 0 where the layout does not fit the world."""
    layout = model_parallel_size(args)
    return args.world_size // layout if layout > 0 and args.world_size % layout == 0 else 0
