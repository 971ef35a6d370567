"""TransformerEngine's attention on the CPU: Megatron's class, over a stand-in of what that wraps.

The stand-in computes what TransformerEngine's documentation says of parts of rows: each rank of the
group has, of 2 N equal chunks of a row, number r and number 2 N - 1 - r. It takes nothing of this
package, so that a wrong group, order, mask or argument gives other numbers.
"""

import importlib.util
import math
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from megatron.core import utils
from megatron.core.extensions import transformer_engine as upstream
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

VERSION = "2.8.0"  # the first that pyproject.toml takes


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the attention was given in one forward."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    mask: Any
    options: dict[str, Any]


class StandInAttention(nn.Module):
    """As ``transformer_engine.pytorch.DotProductAttention``; ``given`` is its constructor's."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given
        self.calls: list[Call] = []

    def get_extra_state(self) -> Tensor:
        """Its state dict has this, as TransformerEngine's has for float8."""
        return torch.empty(0)

    def set_extra_state(self, state: Tensor) -> None:
        """As TransformerEngine's, which takes it back."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Tensor:
        """[s, b, heads, dim] x 3 -> [s, b, heads * dim]; s are this rank's tokens."""
        call = Call(query=(*query.shape,), key=(*key.shape,), mask=attention_mask, options=options)
        self.calls.append(call)
        group = self.given.get("cp_group")
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        chunk = query.size(0) // 2
        mine = torch.cat([torch.arange(chunk) + n * chunk for n in _chunks_of(rank, ranks)])
        places = torch.arange(2 * chunk * ranks)
        keys, values = (_row(x.float(), group, ranks) for x in (key, value))
        shared = query.size(2) // key.size(2)
        keys, values = (x.repeat_interleave(shared, dim=2) for x in (keys, values))
        scale = self.given["softmax_scale"] or 1 / math.sqrt(query.size(-1))
        scores = torch.einsum("ibhd,jbhd->bhij", query.float(), keys) * scale
        if "causal" in options["attn_mask_type"]:
            scores = scores.masked_fill(places > mine[:, None], float("-inf"))
        out = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), values)
        return out.flatten(2).to(query.dtype)


def _chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _row(x: Tensor, group: Any, ranks: int) -> Tensor:
    """The whole row of which ranks have parts, its chunks in order."""
    parts = [x] if group is None else all_gather(x.contiguous(), group=group)
    chunks: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        chunks |= zip(_chunks_of(rank, ranks), part.chunk(2), strict=True)
    return torch.cat([chunks[n] for n in sorted(chunks)])


def engine_attention() -> type[nn.Module]:
    """Megatron's TEDotProductAttention, as it is where TransformerEngine is, over the stand-in."""
    engine = MagicMock(__version__=VERSION, __spec__=None)
    engine.pytorch.DotProductAttention = StandInAttention
    name = f"{upstream.__name__}_over_a_stand_in"
    spec = importlib.util.spec_from_file_location(name, upstream.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    there = {
        name: module,
        "transformer_engine": engine,
        "transformer_engine.pytorch": engine.pytorch,
        "transformer_engine.pytorch.fp8": engine.pytorch.fp8,
        "transformer_engine.pytorch.router": engine.pytorch.router,
    }
    with patch.dict(sys.modules, there), patch.object(utils, "_te_version", None):
        spec.loader.exec_module(module)
    assert module.HAVE_TE
    # Asked when layers are made, too.
    module.is_te_min_version = _is_min_version
    module.get_te_version = lambda: utils.PkgVersion(VERSION)
    found: type[nn.Module] = module.TEDotProductAttention
    return found


def _is_min_version(version: str, check_equality: bool = True) -> bool:
    ours, theirs = utils.PkgVersion(VERSION), utils.PkgVersion(version)
    return ours >= theirs if check_equality else ours > theirs
