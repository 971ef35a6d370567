"""A cell of the parity matrix: a layout of a small model with options, and its flags."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import lcm, prod

from parity.option_flags import APART, ENCODER_DP, FLAGS, FULL, SHARED, UNIFORM

MOST_RANKS = 8
BATCH = 8  # samples of a step, unless replicas or micro-batches ask for more
MODELS = ("qwen3_vl_tiny", "qwen3_vl_moe_tiny", "qwen2_5_vl_tiny")
MORE_MODELS = ("llava_tiny", "siglip2_qwen3_tiny", "internvl_tiny")  # in few cells each
HEARING_MODELS = ("qwen2_audio_tiny", "qwen2_5_omni_tiny")
DENSE, EXPERTS, _ = MODELS
ONE_TOWER_OF_SOUNDS, TWO = HEARING_MODELS
MODES = (UNIFORM, ENCODER_DP, FULL)
CPS = (2, 3, 4)
_FEWEST = 2  # microbatches of a step, in one replica of the decoder
_KEY_HEADS = 4  # of the small models

# What trains where an encoder of sounds is beside that of images, and where it is alone.
_OF_TWO_ENCODERS = ("all", "all but the encoder", "decoder's LoRA")
_OF_SOUNDS = ("all",)
# Adam makes as large a step of a gradient near zero as of any other. Where few tokens reach an
# expert, some gradients of its adapters are rounding alone: another one, where an encoder's passes
# have other units in them. In 16 layers a second step then differs by 8e-5, and by 5e-6 with this.
_STEADY = ("--adam-eps", "1e-3")


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One run of the matrix.

    ``own`` has TP/PP/DP of each encoder on ranks of its own, ``2/1/2|1/1/4``. ``media`` says which
    media the samples keep; with ``text first``, those of the first step have none.
    """

    model: str
    mode: str = UNIFORM
    encoder_tp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    own: str = ""
    sequence_parallel: bool = False
    recompute: str = "none"
    tied: bool = False
    optimizer: str = "plain"
    balance: bool = False
    schedule: str = "separated"  # of full separation
    trained: str = "all"
    away: str = "nothing"
    overlap: bool = False
    kept: str = "all"
    delayed: bool = False
    shared_experts: bool = False
    rows: str = "padded"
    comm: str = "all_gather"  # how keys come from the other ranks of a row
    media: str = "all"
    micro_batch: int = 1

    @property
    def decoder_ranks(self) -> int:
        """The decoder's ranks, the first of all."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def own_sizes(self) -> tuple[tuple[int, int, int], ...]:
        """TP, PP and DP of each encoder on ranks of its own."""
        return tuple(sizes_of(each) for each in self.own.split("|") if each)

    @property
    def ranks(self) -> int:
        """All ranks of the run."""
        return self.decoder_ranks + sum(map(prod, self.own_sizes))

    @property
    def layers(self) -> int:
        """Decoder layers that fill the pipeline; at least four."""
        chunks = self.pp * self.vpp
        return chunks * -(-4 // chunks)

    @property
    def divides(self) -> int:
        """The number that a row's tokens are a multiple of: all layouts can split such rows."""
        return 4 if self.cp == 1 else lcm(*(2 * cp for cp in CPS))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Keys of the model's encoders."""
        if self.model == TWO:
            return "image_encoder", "audio_encoder"
        return ("audio_encoder",) if self.model == ONE_TOWER_OF_SOUNDS else ("image_encoder",)

    @property
    def heterogeneous(self) -> bool:
        """Whether encoders on the decoder's ranks have another tensor parallel size."""
        return self.encoder_tp != self.tp and not self.own

    @property
    def streams(self) -> bool:
        """Whether its encoders work in the pipeline's bubbles."""
        return self.schedule == "streamed"

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.dp * self.microbatches

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, in one replica of the decoder."""
        return max(_FEWEST, BATCH // self.dp)

    @property
    def encoder_replicas(self) -> int:
        """Replicas that share the units of one replica of the decoder in full separation."""
        return self.tp * self.cp * self.pp // self.encoder_tp

    @property
    def possible(self) -> bool:
        """Whether there is such a layout, with these options, that no other cell stands for."""
        return (
            self.ranks <= MOST_RANKS
            and self._encoder_fits
            and (self.pp > 1 or self.vpp == 1)
            and self.tp * self.dp * self.cp % self.ep == 0
            and ("moe" in self.model or self.ep == 1)
            and self._options_go_together
        )

    @property
    def _encoder_fits(self) -> bool:
        if self.mode == APART:
            return self.encoder_tp == self.tp and len(self.own_sizes) == len(self.encoders)
        if self.own or (self.streams and self.encoder_tp > self.tp):
            return False
        if self.mode == ENCODER_DP and self.encoder_tp == self.tp and self.cp == 1:
            return False  # the uniform mode
        if self.tp % self.encoder_tp == 0:
            return True
        # A replica makes up whole stages; several of them in the plainest pipeline alone.
        stages, rest = divmod(self.encoder_tp, self.tp * self.cp)
        return (self.mode == FULL and rest == 0 and stages > 0 and self.pp % stages == 0) and (
            stages == 1 or (self.vpp, self.ep) == (1, 1)
        )

    @property
    def _options_go_together(self) -> bool:
        if self.sequence_parallel and self.tp == 1:
            return False
        if "moe" in self.model and self.tp > 1 and not self.sequence_parallel:
            return False
        if self.tied and self.model == ONE_TOWER_OF_SOUNDS:
            return False  # transformers has none of it
        # Some replica of the encoder has two units, so that it matters which.
        if self.balance and not (
            self.mode == FULL and self.microbatches > self.encoder_replicas > 1
        ):
            return False
        if self.away != "nothing" and self.mode != FULL:
            return False
        if "audio_encoder" in self.encoders:
            choice = _OF_TWO_ENCODERS if len(self.encoders) == 2 else _OF_SOUNDS
            if self.trained not in choice:
                return False
        if self.comm == "a2a":  # which deals out heads
            return _KEY_HEADS // self.tp % self.cp == 0
        return self.comm != "p2p" or self.rows != "packs, lpt"  # p2p takes a zigzag

    @property
    def name(self) -> str:
        """What tells cells apart: the model, its mode and sizes, and each unusual option."""
        sizes = f"e{self.encoder_tp}t{self.tp}p{self.pp}v{self.vpp}d{self.dp}x{self.ep}c{self.cp}"
        options = [
            f"{field.name}-{one_word(str(getattr(self, field.name)))}"
            for field in fields(self)[AXES.index("own") :]
            if getattr(self, field.name) != field.default
        ]
        return "-".join([self.model, self.mode, sizes, *options])

    @property
    def weights(self) -> str:
        """Names the model that it trains, its weights and its samples."""
        media = {"all": [], "text first": [f"text-first-{self.batch}"]}
        marks = ["tied"] * self.tied + ["shared-experts"] * self.shared_experts
        return "-".join(
            [self.model, str(self.layers), *marks, *media.get(self.media, [self.media])]
        )

    @property
    def reference(self) -> str:
        """Names the single rank's run that it is held against."""
        batch = f"{self.micro_batch}-of-{self.batch}-by-{self.divides}"
        steady = ["steady"] if self._steady else []
        packed = [] if self.rows == "padded" else ["packed"]
        return "-".join([self.weights, batch, one_word(self.trained), *steady, *packed])

    def sizes(self) -> dict[str, object]:
        """Sizes of the model's small likeness that are the cell's, by keys below ``model``."""
        sizes = {
            "foundation.num_layers": self.layers,
            "foundation.tie_word_embeddings": str(self.tied).lower(),
        }
        if self.shared_experts:
            sizes["foundation.shared_expert_ffn_hidden_size"] = 32
        return sizes

    def keeps(self, medium: str, *, place: int) -> bool:
        """Whether the run's sample number ``place`` keeps its media of a kind."""
        if self.media in ("images", "sounds"):
            return medium == {"images": "image", "sounds": "audio"}[self.media]
        return self.media == "all" or (self.media == "text first" and place >= self.batch)

    @property
    def _steady(self) -> bool:
        return self.streams and "LoRA" in self.trained

    def shared_flags(self) -> list[str]:
        """What the single rank is given, too, beside the model."""
        return [*self._given(SHARED), *(_STEADY if self._steady else ())]

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        return [*self._sizes(), *self._own_sizes(), *self._given(FLAGS)]

    def _given(self, flags: Mapping[str, Mapping[object, tuple[str, ...]]]) -> Iterator[str]:
        for axis, values in flags.items():
            for flag in values.get(getattr(self, axis), ()):
                yield from self._of_each_encoder(flag)

    def _of_each_encoder(self, flag: str) -> Iterable[str]:
        return dict.fromkeys(flag.replace("{encoder}", encoder) for encoder in self.encoders)

    def _sizes(self) -> Iterator[str]:
        yield from ("--tensor-model-parallel-size", str(self.tp))
        yield from ("--pipeline-model-parallel-size", str(self.pp))
        if self.vpp > 1:
            yield from ("--num-virtual-stages-per-pipeline-rank", str(self.vpp))
        if self.ep > 1:
            yield from ("--expert-model-parallel-size", str(self.ep))
            yield from ("--expert-tensor-parallel-size", "1")
        if self.cp > 1:
            yield from ("--context-parallel-size", str(self.cp), "--cp-comm-type", self.comm)
        if self.mode == FULL:
            yield from ("--full-hetero-dp-schedule", self.schedule)
        if self.heterogeneous or self.mode in (ENCODER_DP, FULL):  # TP 1 where none is given
            flag = f"model.{{encoder}}.tensor_model_parallel_size={self.encoder_tp}"
            yield from self._of_each_encoder(flag)

    def _own_sizes(self) -> Iterator[str]:
        """What lays encoders on ranks of their own, one behind the other."""
        offsets = accumulate(map(prod, self.own_sizes), initial=self.decoder_ranks)
        for key, (tp, pp, dp), offset in zip(self.encoders, self.own_sizes, offsets, strict=False):
            given = {"rank_offset": offset, "tensor_model_parallel_size": tp}
            given |= {"data_parallel_size": dp}
            given |= {} if pp == 1 else {"pipeline_model_parallel_size": pp}
            yield from (f"model.{key}.{name}={value}" for name, value in given.items())


AXES: Sequence[str] = tuple(field.name for field in fields(Cell))


def sizes_of(text: str) -> tuple[int, int, int]:
    """TP, PP and DP, which stand between slashes."""
    tp, pp, dp = map(int, text.split("/"))
    return tp, pp, dp


def one_word(words: str) -> str:
    """Words that a name can have in it.

    >>> one_word("norms, biases, last layer")
    'norms-biases-last-layer'
    """
    return "-".join(words.replace(",", "").replace("'s", "").replace("/", ".").split())
