"""The floating point operations of a model's step, counted from sizes. Pure.

What the model has to do, whatever a run does besides: no recomputed forward, no padding, no blank
image in the place of none. A multiplication and its addition are two operations.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

from loongplug.data.positions import Grid
from loongplug.hetero.balance import EncoderWork
from loongplug.models.architecture import MultimodalArchitecture
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


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """Operations of an encoder and its projector, for media with given grids."""

    name: str
    per_row: int
    per_media_token: int
    tokens_of: Callable[[Grid], int] = field(compare=False)  # the architecture's
    attention: EncoderWork  # multiplications of forward
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
        modules = _parts(mapping, chosen=getattr(model.foundation, "experts_per_token", 1))
        entries = model.entries()
        encoding, enters = [], False
        for entry in encoders(entries):
            name, *beside = entry.modules
            chain = _Chain.of(modules[name], trains=trains, entered=False)
            branches = defaultdict(list)
            for part in (part for each in beside for part in modules[each]):
                branches[part.layer].append(part)
            projector = [
                _Chain.of(branch, trains=trains, entered=chain.trains)
                for branch in branches.values()
            ]
            enters |= chain.trains or any(branch.trains for branch in projector)
            architecture = model.encoder(name)
            encoding.append(
                UnitWork(
                    name=name,
                    per_row=chain.operations // architecture.rows_per_state,
                    per_media_token=sum(branch.operations for branch in projector),
                    tokens_of=architecture.tokens,
                    attention=replace(EncoderWork.of(architecture), linear=0),
                    passes=1 + 2 * chain.attended / architecture.computed_layers,
                )
            )
        decoder = _Chain.of(modules[only_decoder(entries).name], trains=trains, entered=enters)
        text = model.foundation
        heads = text.num_attention_heads * text.kv_channels
        return cls(
            encoders=tuple(encoding),
            per_token=decoder.operations,
            # Of each head, a product with the key and one with the value.
            per_pair=4 * heads * (text.num_layers + 2 * decoder.attended),
        )

    def of_samples(self, lengths: Sequence[int], media: Dictionary[str, Sequence[Grid]]) -> int:
        """Of samples of so many tokens each, whose media have these grids, by encoder."""
        return (
            sum(each.of_media(media.get(each.name, ())) for each in self.encoders)
            + sum(lengths) * self.per_token
            + sum(length * (length + 1) // 2 for length in lengths) * self.per_pair
        )


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
        outer = -1 if "embed" in name else 1_000_000
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
class _Chain:
    """Parts one behind the other: operations per token, attentions with a backward, the end."""

    operations: int
    attended: int
    trains: bool  # the gradient of what comes out is asked for

    @classmethod
    def of(cls, parts: Iterable[_Part], *, trains: Callable[[str], bool], entered: bool) -> Self:
        """``entered``: the gradient of what goes in is asked for."""
        operations = attended = 0
        behind = entered
        for part in sorted(parts, key=lambda each: each.order):
            mine = trains(part.named)
            attended += behind and part.name.endswith(".linear_proj.weight")
            operations += 2 * part.multiplications * (1 + behind + mine)
            behind = behind or mine
        return cls(operations=operations, attended=attended, trains=behind)
