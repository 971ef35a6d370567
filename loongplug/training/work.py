"""The floating point operations of a model's step, counted from sizes. Pure.

What the model has to do, whatever a run does besides: no recomputed forward, no padding, no blank
image in the place of none. A multiplication and its addition are two operations.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Self

from loongplug.data.positions import Grid
from loongplug.hetero.balance import EncoderMacs
from loongplug.models.architecture import MultimodalArchitecture, TextArchitecture
from loongplug.models.entries import encoders, only_decoder
from loongplug.models.hf_mapping import Mapping, is_carried

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
# Where layers are counted: what comes before the first, and behind the last.
BEFORE, BEHIND = -1, 1_000_000


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """Operations of an encoder and its projector, for media with given grids."""

    name: str
    per_row: int
    per_media_token: int
    tokens_of: Callable[[Grid], int] = field(compare=False)  # the architecture's
    attention: EncoderMacs  # multiplications of forward
    passes: float  # one, and two more for the share of its layers with a backward

    def of_media(self, grids: Sequence[Grid]) -> int:
        """Of media with these grids."""
        if not grids:
            return 0
        return (
            sum(map(prod, grids)) * self.per_row
            + sum(map(self.tokens_of, grids)) * self.per_media_token
            + round(2 * self.passes * self.attention.of_units([grids])[0])
        )


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Operations of forward and backward, by what they are proportional to.

    A matrix works once in forward, once for the gradient of its input where something before it
    trains, and once for its own gradient where it trains. Attention's backward, where something
    before it trains, is twice its forward.
    """

    encoders: tuple[UnitWork, ...]
    per_token: int
    per_pair: int  # of a token and one that it attends to, in all layers

    @classmethod
    def of(
        cls,
        model: MultimodalArchitecture,
        mapping: Mapping,
        *,
        trains: Callable[[str], bool],
    ) -> Self:
        """Of a model whose parameters, adapters among them, are in ``mapping``.

        ``trains`` says of a parameter's name whether it trains. Of a layer's experts, the first
        speaks for all.
        """
        found = Chains.of(model, mapping, trains=trains)
        encoding = []
        for name, chain in found.encoders.items():
            architecture = model.encoder(name)
            encoding.append(
                UnitWork(
                    name=name,
                    per_row=chain.operations // architecture.rows_per_state,
                    per_media_token=sum(each.operations for each in found.projectors[name]),
                    tokens_of=architecture.tokens,
                    attention=replace(EncoderMacs.of(architecture), linear=0),
                    passes=1 + 2 * chain.attended / architecture.computed_layers,
                )
            )
        text, decoder = model.foundation, found.decoder
        return cls(
            encoders=tuple(encoding),
            per_token=decoder.operations,
            per_pair=pair_operations(text) * (text.num_layers + 2 * decoder.attended),
        )

    def of_samples(self, lengths: Sequence[int], media: Dictionary[str, Sequence[Grid]]) -> int:
        """Of samples of so many tokens each, whose media have these grids, by encoder."""
        return (
            sum(each.of_media(media.get(each.name, ())) for each in self.encoders)
            + sum(lengths) * self.per_token
            + sum(length * (length + 1) // 2 for length in lengths) * self.per_pair
        )


def pair_operations(text: TextArchitecture) -> int:
    """Forward of one layer of a decoder for a token and one that it attends to.

    Of each head, a product with the key and one with the value.
    """
    return 4 * text.num_attention_heads * text.kv_channels


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A parameter, in the order in which a model uses it, and what it multiplies per token."""

    layer: int
    sublayer: int
    is_bias: bool
    name: str
    multiplications: int
    named: str  # what it is trained as: a tied output is the embedding

    @classmethod
    def of(cls, name: str, *, multiplications: int, named: str) -> Self:
        numbered = _NUMBERED.search(name)
        outer = BEFORE if _BEFORE.search(name) else BEHIND
        return cls(
            layer=int(numbered[1]) if numbered else outer,
            sublayer=next(
                (place for place, each in enumerate(_IN_A_LAYER) if re.search(each, name)),
                len(_IN_A_LAYER),
            ),
            is_bias=name.endswith(".bias"),
            name=name,
            multiplications=multiplications,
            named=named,
        )

    @property
    def order(self) -> tuple[int, int, bool, str]:
        """A bias behind its matrix, whose input's gradient it does not ask for."""
        return self.layer, self.sublayer, self.is_bias, self.name


def _parts(mapping: Mapping, *, chosen: int) -> dict[str, list[_Part]]:
    """All parameters by module; ``chosen`` experts see a token."""
    parts: dict[str, list[_Part]] = defaultdict(list)
    for each in mapping.entries():
        if each.expert or is_carried(each.name):
            continue
        size = sum(prod(source.matrix) for source in each.sources if len(source.matrix) > 1)
        size *= 1 if each.expert is None else chosen
        table = "embedding" in each.name  # looked up, not multiplied by
        uses = [(each.name, 0 if table else size)]
        if each.name != _OUTPUT and _OUTPUT in each.row.names:
            uses.append((_OUTPUT, size))
        for name, multiplications in uses:
            parts[name.partition(".")[0]].append(
                _Part.of(name, multiplications=multiplications, named=each.name)
            )
    return parts


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Operations of the matrices of one layer, or of what is ``BEFORE`` or ``BEHIND`` all, a token.

    ``mlp`` is what of ``forward`` lies in its MLP or experts. ``attended``: its attention has a
    backward. ``reached``: the gradient of what comes out of it is asked for.
    """

    forward: int
    mlp: int
    backward: int
    attended: int
    reached: bool


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Layers one behind the other, by their numbers, in the order in which they run.

    ``trains``: the gradient of what comes out is asked for.
    """

    layers: Dictionary[int, LayerWork]
    trains: bool

    @classmethod
    def of(cls, parts: Iterable[_Part], *, trains: Callable[[str], bool], entered: bool) -> Self:
        """``entered``: the gradient of what goes in is asked for."""
        layers = {}
        behind = entered
        ordered = sorted(parts, key=lambda each: each.order)
        for number, layer in groupby(ordered, key=lambda each: each.layer):
            forward = mlp = backward = attended = 0
            for part in layer:
                mine, size = trains(part.named), 2 * part.multiplications
                attended += behind and part.name.endswith(".linear_proj.weight")
                forward += size
                mlp += size if ".mlp." in part.name else 0
                backward += size * (behind + mine)
                behind = behind or mine
            layers[number] = LayerWork(
                forward=forward, mlp=mlp, backward=backward, attended=attended, reached=behind
            )
        return cls(layers=layers, trains=behind)

    @property
    def operations(self) -> int:
        """Forward and backward of all, a token."""
        return sum(each.forward + each.backward for each in self.layers.values())

    @property
    def attended(self) -> int:
        """Attentions with a backward."""
        return sum(each.attended for each in self.layers.values())


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The layers of all modules of a model.

    ``encoders`` are by name; so are the branches of their ``projectors``, one for each feature of
    a token.
    """

    encoders: Dictionary[str, Chain]
    projectors: Dictionary[str, tuple[Chain, ...]]
    decoder: Chain

    @classmethod
    def of(
        cls, model: MultimodalArchitecture, mapping: Mapping, *, trains: Callable[[str], bool]
    ) -> Self:
        """As :meth:`StepWork.of`."""
        modules = _parts(mapping, chosen=getattr(model.foundation, "experts_per_token", 1))
        entries = model.entries()
        found, projectors = {}, {}
        for entry in encoders(entries):
            name, *beside = entry.modules
            chain = Chain.of(modules[name], trains=trains, entered=False)
            branches = defaultdict(list)
            for part in (part for each in beside for part in modules[each]):
                branches[part.layer].append(part)
            found[name] = chain
            projectors[name] = tuple(
                Chain.of(branch, trains=trains, entered=chain.trains)
                for branch in branches.values()
            )
        enters = any(
            each.trains for name, chain in found.items() for each in (chain, *projectors[name])
        )
        decoder = Chain.of(modules[only_decoder(entries).name], trains=trains, entered=enters)
        return cls(encoders=found, projectors=projectors, decoder=decoder)
