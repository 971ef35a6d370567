"""The comparison of two recordings."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

from torch import Tensor

from loongplug.verify.recorded_run import (
    FIRST_MOMENT,
    PARAMETERS,
    ROOM,
    SECOND_MOMENT,
    Recording,
    gradients_of,
)

GRADIENT_LIMIT = 1e-4
NORM_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
# How much is too much. A parameter's error is the gradient error that would explain it; a second
# moment is a square, and its error twice as large.
LIMITS = {
    "gradients": GRADIENT_LIMIT,
    "parameters": GRADIENT_LIMIT,
    "exp_avg": GRADIENT_LIMIT,
    "exp_avg_sq": 2 * GRADIENT_LIMIT,
}
ALL_LIMITS = LIMITS | {"loss": LOSS_LIMIT, "gradient_norm": NORM_LIMIT}
# A tensor that is nearly zero beside the largest of its kind is measured by that one: what it has
# is rounding. A tensor this small still shows any error of its own above a thousandth.
_FLOOR = 1e-5
_ROUNDING = 2.0**-22  # of a parameter, per step


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A relative error of one step, from 0, or of what is left after the last."""

    what: str
    step: int | None
    error: float

    @property
    def fails(self) -> bool:
        """Beyond what rounding explains; an error that is not a number is."""
        return not self.error <= ALL_LIMITS[self.what]


@dataclass(frozen=True, kw_only=True)
class TensorError(Measured):
    """One measure of one tensor (or one expert of it), and found norm over expected norm."""

    module: str
    name: str
    ratio: float


@dataclass(frozen=True, kw_only=True)
class LossError(Measured):
    """One microbatch's loss; the error is infinite for other samples."""

    what: str = "loss"
    first_sample: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class NormError(Measured):
    """A step's gradient norm on the rank that is farthest off."""

    what: str = "gradient_norm"
    expected: float
    found: float


@dataclass(frozen=True)
class Comparison:
    """All that was measured; ``faults`` are differences that no number measures."""

    tensors: tuple[TensorError, ...]
    losses: tuple[LossError, ...]
    norms: tuple[NormError, ...]
    apart: tuple[str, ...]
    faults: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """The verdict."""
        measured: tuple[Measured, ...] = (*self.tensors, *self.losses, *self.norms)
        return not (self.apart or self.faults or any(each.fails for each in measured))

    def worst(self, what: str, *, module: str | None = None) -> TensorError | None:
        """The largest error of one measure, over all or one module."""
        found = (each for each in self.tensors if each.what == what)
        return max((e for e in found if module in (None, e.module)), key=known_error, default=None)


def known_error(measured: Measured) -> float:
    """The error, the largest of all where it is not a number."""
    return float("inf") if isnan(measured.error) else measured.error


def compare(found: Recording, expected: Recording) -> Comparison:
    """Hold a layout's recording against the single rank's."""
    tensors: list[TensorError] = []
    faults: list[str] = []
    other = [name for name, number in expected.start.items() if found.start.get(name) != number]
    if other:
        faults.append(f"{len(other)} weights differ before the first step: {_first(other)}")
    if len(found.steps) != len(expected.steps):
        faults.append(f"{len(found.steps)} steps, expected {len(expected.steps)}")
    steps = range(min(len(found.steps), len(expected.steps)))
    for what, kind, step in (
        *(("gradients", gradients_of(step), step) for step in steps),
        *((kind, kind, None) for kind in (FIRST_MOMENT, SECOND_MOMENT, PARAMETERS)),
    ):
        faults += _other_names(kind, found, expected)
        tensors += _tensors(what, kind, found, expected, step=step)
    return Comparison(
        tensors=tuple(tensors),
        losses=tuple(_losses(found, expected)),
        norms=tuple(_norms(found, expected)),
        apart=tuple(_apart(found)),
        faults=tuple(faults),
    )


def _other_names(kind: str, found: Recording, expected: Recording) -> Iterable[str]:
    here, there = found.kind(kind).keys(), expected.kind(kind).keys()
    if there - here:
        yield f"{kind}: the layout has none of {_first(sorted(there - here))}"
    if here - there:
        yield f"{kind}: the single rank has none of {_first(sorted(here - there))}"


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _tensors(
    what: str, kind: str, found: Recording, expected: Recording, *, step: int | None
) -> Iterable[TensorError]:
    """Largest absolute difference over the tensor's largest expected value.

    Of parameters, it is the gradient error that would explain their difference. Adam moves a
    parameter by the rate times m / d, where d is about the size of its gradients. A gradient that
    is off by e then moves it by rate * e / d: much, where d is nothing but rounding. So
    e = difference * d / rates is what is measured, relative to the largest d of the tensor, as
    gradients are. For d is taken the least of all steps since the first gradient.
    """
    here, there = found.kind(kind), expected.kind(kind)
    sizes = expected.kind(ROOM) if kind == PARAMETERS else there
    rates = sum(step.learning_rate for step in expected.steps)
    floor = _FLOOR * max(map(_largest, sizes.values()), default=0.0)
    for name in sorted(here.keys() & there.keys()):
        trained = name in sizes
        given = (here[name], there[name], sizes[name] if trained else there[name])
        for piece, (ours, theirs, size) in _pieces(name, expected, *given):
            difference, scale = (ours - theirs).abs(), max(_largest(size), floor)
            if not trained:  # it may not move at all
                scale = 1.0
            elif kind == PARAMETERS:
                rounding = theirs.abs() * _ROUNDING * len(expected.steps)
                difference, scale = (difference - rounding).relu() * size, scale * rates
            norm = theirs.norm().item()
            yield TensorError(
                what=what,
                step=step,
                module=expected.tensors[name].module,
                name=piece,
                error=_largest(difference) / (scale or 1.0),
                ratio=ours.norm().item() / norm if norm else float("inf"),
            )


def _pieces(
    name: str, recording: Recording, *tensors: Tensor
) -> Iterable[tuple[str, tuple[Tensor, ...]]]:
    """A tensor, or each of its experts: among all, a large one would hide a small one."""
    if not recording.tensors[name].experts:
        return [(name, tensors)]
    return [(f"{name}[{number}]", each) for number, each in enumerate(zip(*tensors, strict=True))]


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _losses(found: Recording, expected: Recording) -> Iterable[LossError]:
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=False)):
        here = {loss.first_sample: loss for loss in ours.microbatches}
        there = {loss.first_sample: loss for loss in theirs.microbatches}
        for first in here | there:
            mine, other = here.get(first), there.get(first)
            error, note = float("inf"), ""
            if mine is None or other is None:
                note = f"the {'layout' if mine is None else 'single rank'} has none"
            elif (mine.samples, mine.tokens) != (other.samples, other.tokens):
                note = "other samples"
            else:
                error = abs(mine.loss - other.loss) / (abs(other.loss) or 1.0)
            yield LossError(step=number, first_sample=first, error=error, note=note)


def _norms(found: Recording, expected: Recording) -> Iterable[NormError]:
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=False)):
        wanted = theirs.gradient_norms[0]
        errors = [
            NormError(
                step=number, expected=wanted, found=norm, error=abs(norm - wanted) / (wanted or 1.0)
            )
            for norm in ours.gradient_norms
        ]
        yield max(errors, key=known_error)


def _apart(found: Recording) -> Iterable[str]:
    """Slices whose copies differ, each once, by the first step in which they do."""
    seen: set[tuple[str, str]] = set()
    for number, step in enumerate(found.steps, start=1):
        for note in step.apart:
            if (note.what, note.name) not in seen:
                seen.add((note.what, note.name))
                at_start = number == 1 and note.what == "weights"
                when = "from the start" if at_start else f"in step {number}"
                ranks = ", ".join(map(str, note.ranks))
                yield (
                    f"{note.what} of {note.name} differ {when} between ranks {ranks} "
                    f"(by {note.error:.1e})"
                )
