"""The comparison of two recordings."""

from collections.abc import Iterable
from dataclasses import dataclass, field

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
# What is measured of each tensor, and how much of it is too much. A parameter's error is the
# gradient error that would explain it; a second moment is a square, and its error twice as large.
LIMITS = {
    "gradients": GRADIENT_LIMIT,
    "parameters": GRADIENT_LIMIT,
    "exp_avg": GRADIENT_LIMIT,
    "exp_avg_sq": 2 * GRADIENT_LIMIT,
}
# A tensor that is nearly zero beside the largest of its kind is measured by that one: what it has
# is rounding. A tensor this small still shows any error of its own above a thousandth.
_FLOOR = 1e-5
_ROUNDING = 2.0**-22  # of a parameter, per step


@dataclass(frozen=True)
class TensorError:
    """One measure of one tensor (or one expert of it): error and found norm over expected norm."""

    what: str
    step: int | None
    module: str
    name: str
    error: float
    ratio: float

    @property
    def fails(self) -> bool:
        """Beyond what rounding explains; an error that is not a number is."""
        return not self.error <= LIMITS[self.what]


@dataclass(frozen=True)
class LossError:
    """One microbatch: the relative difference of its loss; infinite for other samples."""

    step: int
    first_sample: int
    error: float
    note: str = ""

    @property
    def fails(self) -> bool:
        """Beyond what rounding explains."""
        return not self.error <= LOSS_LIMIT


@dataclass(frozen=True)
class NormError:
    """A step's gradient norm: the relative difference of the rank that is farthest off."""

    step: int
    expected: float
    found: float
    error: float

    @property
    def fails(self) -> bool:
        """Beyond what rounding explains."""
        return not self.error <= NORM_LIMIT


@dataclass(frozen=True)
class Comparison:
    """All that was measured; ``faults`` are differences that no number measures."""

    tensors: tuple[TensorError, ...]
    losses: tuple[LossError, ...]
    norms: tuple[NormError, ...]
    apart: tuple[str, ...]
    faults: tuple[str, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """The verdict."""
        fails = (
            *(each.fails for each in self.tensors),
            *(each.fails for each in self.losses),
            *(each.fails for each in self.norms),
        )
        return not (self.apart or self.faults or any(fails))

    def worst(self, what: str, *, module: str | None = None) -> TensorError | None:
        """The largest error of one measure, over all or one module."""
        found = [
            each for each in self.tensors if each.what == what and module in (None, each.module)
        ]
        return max(found, key=lambda each: _known(each.error), default=None)


def _known(error: float) -> float:
    """What is not a number is the largest of all."""
    return error if error == error else float("inf")


def compare(found: Recording, expected: Recording) -> Comparison:
    """Hold a layout's recording against the single rank's."""
    tensors: list[TensorError] = []
    faults: list[str] = []
    other = [name for name, number in expected.start.items() if found.start.get(name) != number]
    if other:
        faults.append(f"{len(other)} weights differ before the first step: {_first(other)}")
    if len(found.steps) != len(expected.steps):
        faults.append(f"{len(found.steps)} steps, expected {len(expected.steps)}")
    for step in range(min(len(found.steps), len(expected.steps))):
        kind = gradients_of(step)
        faults += _other_names(kind, found, expected)
        tensors += _relative("gradients", kind, found, expected, step=step)
    for kind in (FIRST_MOMENT, SECOND_MOMENT):
        faults += _other_names(kind, found, expected)
        tensors += _relative(kind, kind, found, expected)
    faults += _other_names(PARAMETERS, found, expected)
    tensors += _moved(found, expected)
    return Comparison(
        tensors=tuple(tensors),
        losses=tuple(_losses(found, expected)),
        norms=tuple(_norms(found, expected)),
        apart=tuple(_apart(found)),
        faults=tuple(faults),
    )


def _other_names(kind: str, found: Recording, expected: Recording) -> Iterable[str]:
    here, there = found.kind(kind).names, expected.kind(kind).names
    if there - here:
        yield f"{kind}: the layout has none of {_first(sorted(there - here))}"
    if here - there:
        yield f"{kind}: the single rank has none of {_first(sorted(here - there))}"


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _relative(
    what: str, kind: str, found: Recording, expected: Recording, *, step: int | None = None
) -> Iterable[TensorError]:
    """Largest absolute difference over the tensor's largest expected value."""
    here, there = found.kind(kind), expected.kind(kind)
    names = sorted(here.names & there.names)
    floor = _FLOOR * max((_largest(there[name]) for name in names), default=0.0)
    for name in names:
        for piece, (ours, theirs) in _pieces(name, expected, here[name], there[name]):
            scale = max(_largest(theirs), floor)
            difference = _largest(ours - theirs)
            yield TensorError(
                what=what,
                step=step,
                module=expected.tensors[name].module,
                name=piece,
                error=difference / scale if scale else difference,
                ratio=_ratio(ours, theirs),
            )


def _moved(found: Recording, expected: Recording) -> Iterable[TensorError]:
    """Parameters, by the gradient error that would explain their difference.

    Adam moves a parameter by the rate times m / d, where d is about the size of its gradients. A
    gradient that is off by e then moves it by rate * e / d: much, where d is nothing but rounding.
    So e = difference * d / rates is what is measured, relative to the largest d of the tensor, as
    gradients are. For d is taken the least of all steps since the first gradient.
    """
    rates = sum(step.learning_rate for step in expected.steps)
    here, there, rooms = found.kind(PARAMETERS), expected.kind(PARAMETERS), expected.kind(ROOM)
    floor = _FLOOR * max((_largest(rooms[name]) for name in rooms.names), default=0.0)
    for name in sorted(here.names & there.names):
        trained = name in rooms.names
        room = rooms[name] if trained else there[name]
        tensors = _pieces(name, expected, here[name], there[name], room)
        for piece, (ours, theirs, space) in tensors:
            difference = (ours - theirs).abs()
            if trained:
                difference = (difference - theirs.abs() * _ROUNDING * len(expected.steps)).relu()
                scale = max(_largest(space), floor) * rates
                difference = difference * space / (scale or 1.0)
            yield TensorError(
                what="parameters",
                step=None,
                module=expected.tensors[name].module,
                name=piece,
                error=_largest(difference),
                ratio=_ratio(ours, theirs),
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


def _ratio(ours: Tensor, theirs: Tensor) -> float:
    expected = theirs.norm().item()
    return ours.norm().item() / expected if expected else float("inf")


def _losses(found: Recording, expected: Recording) -> Iterable[LossError]:
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=False)):
        here = {loss.first_sample: loss for loss in ours.microbatches}
        for loss in theirs.microbatches:
            other = here.pop(loss.first_sample, None)
            if other is None:
                yield LossError(number, loss.first_sample, float("inf"), "the layout has none")
            elif (other.samples, other.tokens) != (loss.samples, loss.tokens):
                yield LossError(number, loss.first_sample, float("inf"), "other samples")
            else:
                error = abs(other.loss - loss.loss) / (abs(loss.loss) or 1.0)
                yield LossError(number, loss.first_sample, error)
        for first in here:
            yield LossError(number, first, float("inf"), "the single rank has none")


def _norms(found: Recording, expected: Recording) -> Iterable[NormError]:
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=False)):
        wanted = theirs.gradient_norms[0]
        farthest = max(ours.gradient_norms, key=lambda norm: _known(abs(norm - wanted)))
        yield NormError(number, wanted, farthest, abs(farthest - wanted) / (wanted or 1.0))


def _apart(found: Recording) -> Iterable[str]:
    """Slices whose copies differ, each once, by the first step in which they do."""
    seen: set[tuple[str, str]] = set()
    for number, step in enumerate(found.steps, start=1):
        for note in step.apart:
            if (note.what, note.name) not in seen:
                seen.add((note.what, note.name))
                when = (
                    "from the start"
                    if number == 1 and note.what == "weights"
                    else (f"in step {number}")
                )
                ranks = ", ".join(map(str, note.ranks))
                yield (
                    f"{note.what} of {note.name} differ {when} between ranks {ranks} "
                    f"(by {note.error:.1e})"
                )
