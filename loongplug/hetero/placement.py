"""Which ranks encode, as far as one model replica is concerned. Pure arithmetic of layouts."""

from dataclasses import dataclass

from loongplug.parallel.layout import Layout, encoder_layout


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the encoder's replicas lie, seen from one rank of the decoder.

    Of the ranks of this rank's model replica, those of each tuple of ``groups`` encode the same
    units together, and different groups encode different units. ``consumers`` are the ranks that
    the features go to: the tensor parallel group of the first stage, by its coordinate. All are
    ranks of the world. ``layout`` is the encoder's over all ranks, and ``on_every_stage`` says
    whether it lies on all of the decoder's stages or on the first alone.

    ``gradient_factor`` is what the sum of the gradients over all encoder replicas is multiplied
    by: each unit counts once where it is encoded once.
    """

    layout: Layout
    groups: tuple[tuple[int, ...], ...]
    consumers: tuple[int, ...]
    on_every_stage: bool
    gradient_factor: float

    def owner(self, number: int) -> int:
        """Which group encodes the unit of the step's microbatch ``number``, each in turn."""
        return number % len(self.groups)


def first_stage_tp(decoder: Layout, *, tp: int, rank: int) -> Placement:
    """Every unit is encoded by all ranks of the first stage's tensor parallel group.

    With a ``tp`` below the decoder's, several replicas encode the same unit (heterogeneous TP).
    """
    consumers = _consumers(decoder, rank)
    return Placement(
        layout=encoder_layout(decoder, tp=tp, on_first_stage=True),
        groups=(consumers,),
        consumers=consumers,
        on_every_stage=False,
        gradient_factor=tp / decoder.tp,
    )


def first_stage_dp(decoder: Layout, *, tp: int, rank: int) -> Placement:
    """The replicas in the first stage's tensor parallel group encode different units."""
    consumers = _consumers(decoder, rank)
    return Placement(
        layout=encoder_layout(decoder, tp=tp, on_first_stage=True),
        groups=_cut(consumers, tp),
        consumers=consumers,
        on_every_stage=False,
        gradient_factor=1.0,
    )


def all_ranks_dp(decoder: Layout, *, tp: int, rank: int) -> Placement:
    """All ranks of a model replica encode, those of later stages too."""
    return Placement(
        layout=encoder_layout(decoder, tp=tp, on_first_stage=False),
        groups=_cut(tuple(decoder.group("tp_cp_pp", rank)), tp),
        consumers=_consumers(decoder, rank),
        on_every_stage=True,
        gradient_factor=1.0,
    )


def _consumers(decoder: Layout, rank: int) -> tuple[int, ...]:
    first = decoder.group("pp", rank)[0]
    return tuple(decoder.group("tp", first))


def _cut(ranks: tuple[int, ...], tp: int) -> tuple[tuple[int, ...], ...]:
    return tuple(ranks[start : start + tp] for start in range(0, len(ranks), tp))
