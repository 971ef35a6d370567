"""Who encodes what of a step's media, and who loads it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.data.units import LoadedUnit, MediaBatch


@dataclass(frozen=True, kw_only=True)
class PlannedShare:
    """What one of the encoder's replicas encodes of a unit, before the media are there.

    But for ``load``, it is the same on every rank of a model replica. ``load`` is the future of
    the rows on the rank that loads them, None on others: it waits until they are loaded. Call it
    once.
    """

    share: Share
    media: MediaBatch  # of the share alone
    load: Callable[[], LoadedUnit] | None


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """A microbatch's media for one encoder, before they are there; who encodes what of them."""

    media: MediaBatch
    shares: tuple[PlannedShare, ...]
    replica: int = 0  # the decoder's, of which the microbatch is


class StepPlans(Protocol):
    """Plans of steps: who encodes what of each microbatch's media, which are given by grids."""

    def plan(self, media: Sequence[Sequence[Grid]]) -> Any:
        """That of a step, in whatever process."""

    def keep(self, media: Sequence[Sequence[Grid]], plan: Any) -> None:
        """Here is the plan that another process made of a step."""

    def shares(self, media: Sequence[Sequence[Grid]]) -> Sequence[tuple[Share, ...]] | None:
        """Who encodes what; None where the step is as without a plan."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which replica of the encoder encodes which microbatch's media. Pure; the same on all ranks.

    Each replica in turn, from a step's first microbatch on. ``by_cost`` assigns by what media cost:
    it is given their grids and the number of ``replicas``, and may let several replicas share a
    microbatch's media. It does so with those that are left at a step's end, fewer than there are
    replicas, or, for ``whole_steps``, with all microbatches of a step. These are asked for
    together.

    ``by_plan`` goes before that, for a whole step; it says None where that is as without it.
    """

    replicas: int = 1
    by_cost: Callable[..., Sequence[tuple[Share, ...]]] | None = None
    whole_steps: bool = False
    by_plan: StepPlans | None = None

    def together(self, step: int) -> range:
        """Which ones of a step of so many microbatches are assigned together."""
        return range(step) if self.by_plan is not None else self._compared(step)

    def of(
        self, numbers: range, media: Sequence[Sequence[Grid]], *, step: int
    ) -> Sequence[tuple[Share, ...]]:
        """The shares of these microbatches of a step of so many, whose media have such grids."""
        if self.by_plan is not None and (planned := self.by_plan.shares(media)) is not None:
            return planned
        together = self._compared(step)
        in_turn: list[tuple[Share, ...]] = [
            (Share(encoder_replica=number % self.replicas),)
            for number in numbers
            if number not in together
        ]
        of_last = media[len(in_turn) :]
        if self.by_cost is None or not of_last:
            return in_turn
        assert len(of_last) == len(together), "costs are compared"
        return [*in_turn, *self.by_cost(of_last, replicas=self.replicas)]

    def of_step(self, media: Sequence[Sequence[Grid]]) -> Sequence[tuple[Share, ...]]:
        """The same of all microbatches of a step."""
        return self.of(range(len(media)), media, step=len(media))

    def _compared(self, step: int) -> range:
        """Those whose costs are compared."""
        if self.by_cost is None:
            return range(step, step)
        return range(0 if self.whole_steps else step - step % self.replicas, step)


ONE_REPLICA = Assignment()


@dataclass(frozen=True, kw_only=True)
class EncoderUnits:
    """How units are made for one encoder: of which kinds of media, and for which replicas.

    Media are loaded for those replicas that ``loads`` names.
    """

    kinds: tuple[str, ...]
    assignment: Assignment = ONE_REPLICA
    loads: Collection[int] = (0,)


def planned_units(
    numbers: range,
    media: Mapping[str, Sequence[MediaBatch]],
    *,
    step: int,
    replicas: Sequence[int],
    encoders: Mapping[str, EncoderUnits],
    load: Callable[[MediaBatch], Callable[[], LoadedUnit]],
) -> list[dict[str, PlannedUnit]]:
    """Of each of these microbatches of a step of so many, by encoder.

    They are of these ``replicas`` of the decoder. ``load`` makes the future of what is to be loaded
    here.
    """
    found: list[dict[str, PlannedUnit]] = [{} for _ in numbers]
    for name, encoder in encoders.items():
        grids = [each.grids for each in media[name]]
        assigned = encoder.assignment.of(numbers, grids, step=step)
        of_each = zip(found, media[name], assigned, replicas, strict=True)
        for units, each, shares, replica in of_each:
            parts = [(share, each.part(share.media)) for share in shares]
            units[name] = PlannedUnit(
                media=each,
                shares=tuple(
                    PlannedShare(
                        share=share,
                        media=part,
                        load=load(part) if share.encoder_replica in encoder.loads else None,
                    )
                    for share, part in parts
                ),
                replica=replica,
            )
    return found
