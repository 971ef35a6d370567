"""How much work a model does: operations of its layers, forward, backward and again. Pure.

Counted from sizes. A multiplication and its addition are two operations. A matrix works once in
forward, once for the gradient of its input where something before it trains, and once for its own
gradient where it trains. Attention's backward, where something before it trains, is twice its
forward. What is recomputed comes on top and is said apart.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import inf, prod
from typing import Literal, NamedTuple, Self

from loongplug.data.sample import Grid
from loongplug.models.architecture import EncoderArchitecture, MultimodalArchitecture
from loongplug.models.entries import encoders, only_decoder
from loongplug.models.family import HuggingFaceModel
from loongplug.models.hf_mapping import Mapping, is_carried
from loongplug.models.lora.mapping import adapter_table, with_adapters

Window = int | None  # the side in rows that a layer attends within; None: all that is there
# By what work is proportional to: states (a decoder's are tokens), which meet matrices, or pairs
# of rows that see each other, by window. Of layers they are operations of one; of what goes through
# layers, how many there are.
Amounts = Counter[Literal["states"] | Window]
_NOTHING: Amounts = Counter()

# What of a layer is recomputed.
WHOLE = frozenset(("core_attn", "mlp", "others"))

_OUTPUT = "text_decoder.output_layer.weight"
# In the order in which a layer runs. A linear's adapter matches, too, and comes behind it.
_IN_A_LAYER = (
    r"input_layernorm",
    r"linear_qkv",
    r"[qk]_layernorm",
    r"linear_proj",
    r"norm\b",
    r"router",
    r"linear_fc1",
    r"linear_fc2",
)
_NUMBERED = re.compile(r"\.(?:layers|deepstack)\.(\d+)\.")
_BEFORE = re.compile(r"embed|\.conv\d")


def operations(work: Amounts, extent: Amounts) -> int:
    """Operations of layers' ``work`` for so much that goes through."""
    return sum(each * extent[what] for what, each in work.items())


def text_extent(lengths: Iterable[int]) -> Amounts:
    """Samples of so many tokens, each of which sees itself and those before it."""
    lengths = tuple(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return Counter({"states": sum(lengths), None: pairs})


def media_extent(encoder: EncoderArchitecture, grids: Sequence[Grid]) -> Amounts:
    """Media in an encoder's layers, where rows of a frame see each other."""
    found: Amounts = Counter({"states": sum(map(prod, grids)) // encoder.rows_per_state})
    for side in encoder.attention_windows():
        found[side] = sum(time * frame_pairs(height, width, side) for time, height, width in grids)
    return found


def frame_pairs(height: int, width: int, side: Window) -> int:
    """Pairs of a frame's rows that share a window."""
    found = 1
    for length in (height, width):
        whole, rest = divmod(length, side or length)
        found *= whole * (side or length) ** 2 + rest**2
    return found


def frame_macs(encoder: EncoderArchitecture) -> Callable[[int, int], int]:
    """Multiplications and additions of an encoder's forward for a frame of height x width rows.

    What is before and behind the layers, a few percent, is left out. A size is counted once: the
    images of a run share few sizes.
    """
    hidden, rows = encoder.hidden_size, encoder.rows_per_state
    layer = 4 * hidden * hidden + encoder.mlp_matrices * hidden * encoder.ffn_hidden_size
    linear = encoder.computed_layers * layer // rows
    attention = [
        (side, layers * 2 * hidden // rows**2)
        for side, layers in encoder.attention_windows().items()
    ]

    @cache
    def macs(height: int, width: int) -> int:
        pairs = sum(each * frame_pairs(height, width, side) for side, each in attention)
        return linear * height * width + pairs

    return macs


def macs_for_a_token(encoder: EncoderArchitecture) -> int:
    """Multiplications and additions of an encoder's forward for one token of its smallest medium.

    As :func:`frame_macs` counts them.
    """
    time, height, width = grid = encoder.blank_grid()
    return time * frame_macs(encoder)(height, width) // encoder.tokens(grid)


class _Part(NamedTuple):
    """A parameter, in the order in which a model uses it, and what it multiplies per state.

    A bias stands behind its matrix, whose input's gradient it does not ask for.
    """

    layer: float  # infinite behind all layers
    sublayer: int
    is_bias: bool
    name: str
    multiplications: int
    trains: bool


def _parts(
    mapping: Mapping, *, chosen: int, trains: Callable[[str], bool]
) -> dict[str, list[_Part]]:
    """All parameters by module; ``chosen`` experts see a token, and the first speaks for all."""
    parts: dict[str, list[_Part]] = defaultdict(list)
    for each in mapping.entries():
        if each.expert or is_carried(each.name):
            continue
        size = sum(prod(source.matrix) for source in each.sources if len(source.matrix) > 1)
        size *= 1 if each.expert is None else chosen
        table = "embedding" in each.name  # looked up, not multiplied by
        uses = {each.name: 0 if table else size}
        if _OUTPUT in each.row.names:  # a tied one is trained as the embedding
            uses[_OUTPUT] = size
        for name, multiplications in uses.items():
            numbered = _NUMBERED.search(name)
            kinds = (at for at, kind in enumerate(_IN_A_LAYER) if re.search(kind, name))
            parts[name.partition(".")[0]].append(
                _Part(
                    layer=int(numbered[1]) if numbered else -1 if _BEFORE.search(name) else inf,
                    sublayer=next(kinds, len(_IN_A_LAYER)),
                    is_bias=name.endswith(".bias"),
                    name=name,
                    multiplications=multiplications,
                    trains=trains(each.name),
                )
            )
    return parts


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Work of one layer, or of what is before or behind all.

    ``mlp`` is what of the forward for a state lies in its MLP or experts. ``reached``: the gradient
    of what comes out of it is asked for.
    """

    forward: Amounts
    backward: Amounts
    mlp: int
    reached: bool

    def again(self, recomputed: frozenset[str]) -> Amounts:
        """The work that its backward has besides where so much of it is recomputed."""
        if not self.reached:
            return Counter()
        found = self.forward.copy() if "core_attn" in recomputed else Counter()
        others = self.forward["states"] - self.mlp
        found["states"] = self.mlp * ("mlp" in recomputed) + others * ("others" in recomputed)
        return found


def _layers(
    parts: Iterable[_Part], *, entered: bool, attention: Sequence[Amounts] = ()
) -> tuple[LayerWork, ...]:
    """In the order in which they run, with what is before the first and behind the last.

    ``entered``: the gradient of what goes in is asked for. ``attention`` is each layer's forward.
    """
    inside: list[list[_Part]] = [[] for _ in range(len(attention) + 2)]
    for part in sorted(parts):
        inside[int(min(part.layer, len(attention))) + 1].append(part)
    found, reached = [], entered
    for own, pairs in zip(inside, (_NOTHING, *attention, _NOTHING), strict=True):
        forward, backward, mlp = pairs.copy(), _NOTHING.copy(), 0
        for part in own:
            size = 2 * part.multiplications
            if reached and part.name.endswith(".linear_proj.weight"):
                backward += pairs + pairs
            forward["states"] += size
            backward["states"] += size * (reached + part.trains)
            mlp += size if ".mlp." in part.name else 0
            reached = reached or part.trains
        found.append(LayerWork(forward=forward, backward=backward, mlp=mlp, reached=reached))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class EntryAmounts:
    """Work of an entry's ``layers``, the first and the last of which stand for what is around them.

    ``beside`` are those of an encoder's projectors, whose states are tokens.
    """

    layers: tuple[LayerWork, ...]
    beside: tuple[LayerWork, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the gradient of anything that comes out is asked for."""
        return any(each.reached for each in (self.layers[-1], *self.beside))

    def of(self, extent: Amounts, *, tokens: int = 0, recomputed: bool = False) -> tuple[int, int]:
        """Operations of forward and backward; ``recomputed``: this runs the layers once more."""
        forward, backward = operations(self.forward, extent), operations(self.backward, extent)
        if recomputed and self.layers[-1].reached:
            backward += forward
        for each in self.beside:
            forward += each.forward["states"] * tokens
            backward += each.backward["states"] * tokens
        return forward, backward

    @cached_property
    def forward(self) -> Amounts:
        """Forward work of all layers."""
        return sum((each.forward for each in self.layers), _NOTHING)

    @cached_property
    def backward(self) -> Amounts:
        """Backward work of all layers."""
        return sum((each.backward for each in self.layers), _NOTHING)


@dataclass(frozen=True, kw_only=True)
class ModelAmounts:
    """Work of all ``entries`` of a model, by name, the decoder last."""

    model: MultimodalArchitecture
    entries: Dictionary[str, EntryAmounts]

    @classmethod
    def of(
        cls,
        model: MultimodalArchitecture,
        hugging_face: HuggingFaceModel,
        *,
        trains: Callable[[str], bool],
    ) -> Self:
        """``trains`` says of a parameter's name, an adapter's too, whether it trains."""
        text = model.foundation
        parts = _parts(
            with_adapters(hugging_face.mapping, adapter_table(model, hugging_face)),
            chosen=getattr(text, "experts_per_token", 1),
            trains=trains,
        )
        found: dict[str, EntryAmounts] = {}
        for name, *beside in (entry.modules for entry in encoders(model.entries())):
            encoder = model.encoder(name)
            pair = 4 * encoder.hidden_size // encoder.rows_per_state**2
            windows = map(encoder.attention_window, range(encoder.computed_layers))
            attention: list[Amounts] = [Counter({each: pair}) for each in windows]
            layers = _layers(parts[name], entered=False, attention=attention)
            # One for each feature of a token.
            branches: dict[float, list[_Part]] = defaultdict(list)
            for part in (part for each in beside for part in parts[each]):
                branches[part.layer].append(part)
            projectors = (_layers(each, entered=layers[-1].reached) for each in branches.values())
            found[name] = EntryAmounts(layers=layers, beside=tuple(chain(*projectors)))
        # Of each head, a product with the key and one with the value.
        pair = 4 * text.num_attention_heads * text.kv_channels
        decoder = only_decoder(model.entries()).name
        entered = any(each.trains for each in found.values())
        attention = [Counter({None: pair})] * text.num_layers
        layers = _layers(parts[decoder], entered=entered, attention=attention)
        return cls(model=model, entries={**found, decoder: EntryAmounts(layers=layers)})

    @property
    def decoder(self) -> EntryAmounts:
        """The decoder's."""
        return self.entries[only_decoder(self.model.entries()).name]

    def of_media(
        self, encoder: str, grids: Sequence[Grid], *, recomputed: bool = False
    ) -> tuple[int, int]:
        """Operations of media in an encoder and its projector, as :meth:`EntryAmounts.of`."""
        architecture = self.model.encoder(encoder)
        return self.entries[encoder].of(
            media_extent(architecture, grids),
            tokens=sum(map(architecture.tokens, grids)),
            recomputed=recomputed,
        )

    def of_samples(self, lengths: Sequence[int], media: Dictionary[str, Sequence[Grid]]) -> int:
        """Operations of the model for samples of so many tokens, whose media have these grids.

        That is forward and backward, without recompute and padding. Media are by encoder.
        """
        encoding = sum(sum(self.of_media(*each)) for each in media.items())
        return encoding + sum(self.decoder.of(text_extent(lengths)))
