"""The parity matrix's cells with encoders on ranks of their own. Pure and the same every time.

Sizes are written as published tables have them, TP/PP/DP of the decoder, then of each encoder:
``2/1/2|1/1/4``. An encoder's ranks begin behind those of the modules before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from parity.cells import BATCH
from parity.published import A7, A8
from parity.saving_cells import TRAINED, TrainedCell, one_word

DEEPSTACK, EXPERTS, TWO = "qwen3_vl_tiny", "qwen3_vl_moe_tiny", "qwen2_5_omni_tiny"
# The published tables have LLaVA; deepstack's features are more to send.
PUBLISHED_MODELS = ("llava_tiny", DEEPSTACK)
_FEWEST = 2  # microbatches of a step, in one replica of the decoder
# Which media rows keep, by the kinds of media: all their own, or those that are named.
ROWS = ("whole", "text", "text first", "images", "sounds")


@dataclass(frozen=True, kw_only=True, order=True)
class PlacementCell(TrainedCell):
    """One run with all encoders on ranks of their own.

    ``own`` has TP/PP/DP of each encoder, in the order of their keys. ``rows`` says which media the
    rows keep; with ``text first``, those of the first step have none. ``table`` names the
    published one that the cell is of.
    """

    own: str
    micro_batch: int = 1
    rows: str = "whole"
    overlap: bool = False  # of the experts' exchange
    table: str = ""

    @property
    def own_sizes(self) -> tuple[tuple[int, int, int], ...]:
        """TP, PP and DP of each encoder."""
        return sizes_of(self.own)

    @property
    def ranks(self) -> int:
        """Those of all modules."""
        return super().ranks + sum(map(prod, self.own_sizes))

    @property
    def heterogeneous(self) -> bool:
        """What it says of encoders on the decoder's ranks; there are none."""
        return False

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.dp * max(_FEWEST, BATCH // self.dp)

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        own = self.own.replace("/", ".").replace("|", "+")
        marks = [super().name, f"own-{own}", f"mbs{self.micro_batch}", one_word(self.trained)]
        marks += [one_word(self.rows)]
        return "-".join([*marks, *(["overlap"] if self.overlap else [])])

    @property
    def weights(self) -> str:
        """Names the model that it trains, its weights and its rows."""
        rows = {"whole": "", "text first": f"-text-first-{self.batch}"}
        return super().weights + rows.get(self.rows, f"-{self.rows}")

    @property
    def reference(self) -> str:
        """Names the single rank's run, whose microbatches are the same."""
        return f"{super().reference}-{self.micro_batch}-of-{self.batch}"

    def keeps(self, medium: str, *, place: int) -> bool:
        """Whether the run's sample number ``place`` keeps its media of a kind."""
        if self.rows in ("images", "sounds"):
            return medium == {"images": "image", "sounds": "audio"}[self.rows]
        return self.rows == "whole" or (self.rows == "text first" and place >= self.batch)

    def shared_flags(self) -> list[str]:
        """What the single rank is given, too."""
        sizes = ("--micro-batch-size", self.micro_batch, "--global-batch-size", self.batch)
        return [*super().shared_flags(), *map(str, sizes)]

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        given = [*super().flags(), *(["--overlap-moe-expert-parallel-comm"] * self.overlap)]
        return [*given, *own_flags(self.encoders, self.own_sizes, first=super().ranks)]


def sizes_of(own: str) -> tuple[tuple[int, int, int], ...]:
    """TP, PP and DP of each encoder; of none where nothing is written."""
    return tuple(_sizes(each) for each in own.split("|") if each)


def own_flags(
    encoders: Sequence[str], sizes: Sequence[tuple[int, int, int]], *, first: int
) -> Iterator[str]:
    """What lays encoders on ranks of their own, one behind the other from ``first`` on."""
    offsets = accumulate(map(prod, sizes), initial=first)
    for key, (tp, pp, dp), offset in zip(encoders, sizes, offsets, strict=False):
        given = {"rank_offset": offset, "tensor_model_parallel_size": tp}
        given |= {"data_parallel_size": dp}
        given |= {} if pp == 1 else {"pipeline_model_parallel_size": pp}
        yield from (f"model.{key}.{name}={value}" for name, value in given.items())


def placed(sizes: str, *, model: str = DEEPSTACK, **options: Any) -> PlacementCell:
    """The cell of these sizes, as tables have them."""
    decoder, _, own = sizes.partition("|")
    tp, pp, dp = _sizes(decoder)
    cell = PlacementCell(model=model, tp=tp, pp=pp, dp=dp, own=own, **options)
    assert len(cell.own_sizes) == len(cell.encoders), sizes
    assert cell.trained in TRAINED, cell
    assert cell.rows in ROWS, cell
    return cell


def placement_cells() -> list[PlacementCell]:
    """All of them, those of the published tables first."""
    return [
        *(cell for model in PUBLISHED_MODELS for cell in _published(model)),
        *_replicas(),
        *_pipelines(),
        *_experts(),
        *_options(),
        *_media(),
        *_stages(),
        *_media_of_stages(),
    ]


def _published(model: str) -> list[PlacementCell]:
    """Four ranks for each module: the decoder frozen (A7), or all trained (A8)."""
    frozen = [placed(each, model=model, trained="all but the decoder", table="A7") for each in A7]
    return frozen + [placed(each, model=model, micro_batch=2, table="A8") for each in A8]


def _replicas() -> list[PlacementCell]:
    """Numbers of replicas that differ; where samples are few, one encodes a blank."""
    return [
        placed("1/1/2|1/1/3", micro_batch=3),
        placed("1/1/2|1/1/3", micro_batch=1),  # one without samples
        placed("1/1/3|1/1/2", micro_batch=2),
        placed("1/1/3|1/1/2", micro_batch=1),  # a sample and a half each
        placed("1/1/1|1/1/4", micro_batch=4),
        placed("1/1/1|1/1/4", micro_batch=3),  # one without samples
        placed("1/1/4|1/1/1"),
        placed("1/1/4|1/1/1", micro_batch=2, optimizer="overlapped"),
        placed("2/1/2|1/1/3", micro_batch=3, sequence_parallel=True),
    ]


def _pipelines() -> list[PlacementCell]:
    """Decoders of several stages, of virtual ones too."""
    return [
        placed("1/2/1|1/1/1"),
        placed("1/2/1|1/1/2", micro_batch=2, tied=True, optimizer="overlapped"),
        placed("1/4/1|1/1/2", micro_batch=2),
        placed("1/2/1|1/1/1", vpp=2),
        placed("1/2/1|2/1/1", vpp=4, recompute="both"),
        placed("1/2/2|1/1/1", vpp=2, optimizer="distributed"),
        placed("1/2/2|1/1/3", micro_batch=3, vpp=2, tied=True),
        placed("1/4/1|1/1/1", vpp=2),
        placed("2/2/1|1/1/2", micro_batch=2, vpp=2, sequence_parallel=True, recompute="encoder"),
    ]


def _experts() -> list[PlacementCell]:
    """Decoders with experts."""
    split: dict[str, Any] = {"model": EXPERTS, "sequence_parallel": True}
    return [
        placed("1/1/1|1/1/1", model=EXPERTS),
        placed("1/1/2|1/1/1", model=EXPERTS, ep=2),
        placed("1/1/2|1/1/3", model=EXPERTS, ep=2, micro_batch=3, optimizer="overlapped"),
        placed("2/1/1|1/1/2", **split, ep=2, micro_batch=2),
        placed("1/2/2|2/1/1", model=EXPERTS, ep=2, recompute="both"),
        placed("2/2/1|1/1/1", **split, ep=2, vpp=2),
        placed("1/1/2|1/1/1", model=EXPERTS, ep=2, overlap=True),
        placed("1/2/2|1/1/2", model=EXPERTS, ep=2, vpp=2, overlap=True),
    ]


def _options() -> list[PlacementCell]:
    """What trains, how it is kept, and which part of the sequence a rank has."""
    return [
        placed("1/1/1|1/1/1", trained="all but the encoder"),
        placed("1/1/1|1/1/1", trained="the decoder"),  # nothing goes back
        placed("2/1/1|1/1/2", micro_batch=2, trained="decoder's LoRA", sequence_parallel=True),
        placed("1/2/1|2/1/1", trained="LoRA of all modules"),
        placed("1/1/2|1/1/1", trained="norms, biases, last layer", optimizer="distributed"),
        placed("2/1/1|1/1/1", sequence_parallel=True),
        placed("2/1/1|2/1/1", sequence_parallel=True, optimizer="overlapped", tied=True),
        placed("4/1/1|1/1/2", micro_batch=2, sequence_parallel=True, recompute="encoder"),
        placed("2/1/1|4/1/1", recompute="decoder"),
        placed("2/1/1|1/1/2", micro_batch=2, model="qwen2_5_vl_tiny"),
        placed("1/2/1|2/1/1", model="siglip2_qwen3_tiny"),
        placed("1/1/2|1/1/3", micro_batch=3, model="internvl_tiny"),
        placed("1/1/2|2/1/1", micro_batch=2, model="qwen2_audio_tiny"),
    ]


def _media() -> list[PlacementCell]:
    """Two encoders, and steps in which one of them, or all, have nothing to encode."""
    return [
        placed("1/1/1|1/1/2", micro_batch=2, rows="text first"),
        placed("1/2/1|1/1/1", vpp=2, rows="text first", optimizer="overlapped"),
        placed("1/1/2|1/1/1", rows="text"),
        placed("1/1/1|1/1/1|1/1/1", model=TWO),
        placed("1/2/1|1/1/2|2/1/1", model=TWO, micro_batch=2),
        placed("1/2/1|1/1/1|1/1/1", model=TWO, vpp=2),
        placed("2/2/1|2/1/1|1/1/2", model=TWO, micro_batch=2, recompute="both"),
        placed("2/1/1|2/1/1|1/1/2", model=TWO, micro_batch=2, sequence_parallel=True),
        placed("1/1/2|1/1/3|1/1/1", model=TWO, micro_batch=3, optimizer="overlapped"),
        placed("1/1/1|1/1/2|1/1/1", model=TWO, micro_batch=2, rows="images"),
        placed("1/2/1|1/1/1|1/1/1", model=TWO, rows="sounds"),
        placed("1/1/1|1/1/1|1/1/2", model=TWO, micro_batch=2, rows="text first"),
    ]


def _stages() -> list[PlacementCell]:
    """Encoders with pipeline stages, beside decoders of every kind."""
    return [
        placed("1/1/2|1/2/3", micro_batch=3),
        placed("1/1/3|1/2/2", micro_batch=1),  # a sample and a half each
        placed("1/1/1|1/2/3", micro_batch=2),  # one without samples
        placed("1/1/4|1/2/1"),
        placed("1/1/1|1/3/1", recompute="both"),
        placed("1/2/1|1/2/1", tied=True, optimizer="overlapped"),
        placed("2/2/1|2/2/1", vpp=2, sequence_parallel=True),
        placed("1/1/1|1/2/1", trained="all but the encoder"),  # nothing comes back to a stage
        placed("1/1/1|1/2/1", trained="the decoder"),
        placed("1/2/1|1/2/1", model="llava_tiny"),
        placed("1/1/1|1/2/1", model="qwen2_audio_tiny"),
        placed("1/1/2|1/2/1", model=EXPERTS, ep=2),
        placed("2/1/1|1/2/2", model=EXPERTS, ep=2, sequence_parallel=True, micro_batch=2),
        placed("1/2/2|1/2/1", model=EXPERTS, ep=2, vpp=2, overlap=True),
    ]


def _media_of_stages() -> list[PlacementCell]:
    """Encoders with stages that have nothing to encode, one of two or all of them."""
    return [
        placed("1/1/1|1/2/1", rows="text"),
        placed("1/2/1|1/2/1", vpp=2, rows="text first", optimizer="overlapped"),
        placed("1/3/1|1/2/1|1/1/1", model=TWO),  # figure 4(a) of the MIMO paper
        placed("1/1/1|1/2/1|1/2/1", model=TWO, rows="images"),
        placed("1/1/2|1/1/1|1/2/2", model=TWO, rows="sounds"),
        placed("1/1/1|1/2/1|1/1/1", model=TWO, rows="text first"),
    ]


def _sizes(text: str) -> tuple[int, int, int]:
    tp, pp, dp = map(int, text.split("/"))
    return tp, pp, dp
