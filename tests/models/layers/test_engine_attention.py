"""Parts of rows beside TransformerEngine: which of them its attention gets, and with what.

Megatron's class for it is the one that is installed; what that wraps is a stand-in.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engine_stand_in import Call, StandInAttention, engine_attention
from layer_configs import ALONE, decoder_config
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from ranks import run_ranks
from torch import Tensor

from loongplug.context.balance import balanced
from loongplug.context.segments import Segments
from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.models.layers.attention import SDPAttention
from loongplug.models.layers.context import engine
from loongplug.models.layers.context.attention import ContextAttention
from loongplug.models.layers.context.engine import over_parts_of_rows
from loongplug.models.layers.context.row import context_row
from loongplug.models.layers.inputs import PackedSegments

HEADS, GROUPS, DIM = 12, 6, 8
LENGTH, ROWS = 48, 2
COMM_TYPES = ("all_gather", "a2a", "p2p")
TOLERANCE = 2e-6
EXACT = (torch.bfloat16, torch.float32)  # so that differences are those of an error


def attention(*, cp: int, comm_type: str | None = None, **changes: Any) -> Any:
    """The class that decoders get beside TransformerEngine."""
    config = decoder_config(
        num_attention_heads=HEADS, num_query_groups=GROUPS, context_parallel_size=cp, **changes
    )
    groups = SimpleNamespace(tp=ALONE.tp, cp=dist.group.WORLD)
    return over_parts_of_rows(engine_attention())(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=comm_type,
        softmax_scale=None,
        pg_collection=groups,
    )


def drawn(*, dim: int = DIM, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value, [length, rows, heads, dim], and the output's gradient."""
    generator = torch.Generator().manual_seed(7)
    query, key, value, grad = (
        torch.randn(LENGTH, ROWS, heads, dim, generator=generator).to(dtype)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    return [query, key, value, grad.flatten(2)]


def of_one_rank() -> list[Tensor]:
    """Output and gradients in float64."""
    query, key, value, grad = (x.double() for x in drawn())
    leaves = [x.requires_grad_() for x in (query, key, value)]
    config = decoder_config(num_attention_heads=HEADS, num_query_groups=GROUPS)
    one = SDPAttention(config, 1, AttnMaskType.causal, "self", pg_collection=ALONE)
    out = one(*leaves, None)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def padded_row(rank: int, cp: int) -> PackedSegments:
    split = zigzag(LENGTH, cp=cp)
    row = context_row(split, (LENGTH,), rank=rank, device="cpu")
    return PackedSegments(qkv_format="sbhd", context=row)


def _by_engine(rank: int, cp: int) -> dict[str, tuple[list[Tensor], list[Call], dict[str, Any]]]:
    found = {}
    mine = torch.from_numpy(zigzag(LENGTH, cp=cp).parts[rank].places)
    for comm_type in COMM_TYPES:
        query, key, value, grad = (x[mine] for x in drawn())
        leaves = [x.requires_grad_() for x in (query, key, value)]
        module = attention(cp=cp, comm_type=comm_type)
        with patch.object(engine, "_HALF", EXACT):
            out = module(
                *leaves,
                None,
                attn_mask_type=AttnMaskType.causal,
                packed_seq_params=padded_row(rank, cp),
            )
        grads = torch.autograd.grad(out, leaves, grad)
        given = {name: module.given[name] for name in ("cp_comm_type", "cp_global_ranks")}
        given["group"] = module.given["cp_group"] is dist.group.WORLD
        given["stream"] = module.given["cp_stream"] is not None
        given["mask"] = module.given["attn_mask_type"]
        given["heads"] = (module.given["num_attention_heads"], module.given["num_gqa_groups"])
        found[comm_type] = [out.detach(), *grads], module.calls, given
    return found


@pytest.mark.quick
def test_padded_rows_are_the_engines() -> None:
    cp = 3
    by_rank = run_ranks(_by_engine, cp, cp=cp)
    order = torch.from_numpy(zigzag(LENGTH, cp=cp).order)
    for comm_type in COMM_TYPES:
        for _, calls, given in (found[comm_type] for found in by_rank):
            (call,) = calls
            assert (call.query, call.key) == (
                (LENGTH // cp, ROWS, HEADS, DIM),
                (LENGTH // cp, ROWS, GROUPS, DIM),
            )
            # No format and no lengths: sbhd, of which all counts.
            assert (call.mask, call.options) == (None, {"attn_mask_type": "causal"})
            assert given == {
                "cp_comm_type": comm_type,
                "cp_global_ranks": list(range(cp)),
                "group": True,
                "stream": True,
                "mask": "causal",
                "heads": (HEADS, GROUPS),
            }
        parts = zip(*(found[comm_type][0] for found in by_rank), strict=True)
        for ours, theirs in zip(parts, of_one_rank(), strict=True):
            difference = (torch.cat(ours).double() - theirs[order]).abs().max()
            assert difference <= TOLERANCE * theirs.abs().max().clamp(min=1), comm_type


def _split_otherwise(cp: int) -> TokenSplit:
    return balanced(Segments.of([20, 28]), cp=cp, block=4)


# What a rank of two is given, by what is different about it.
OTHERS: dict[str, dict[str, Any]] = {
    "a pack": {"lengths": [20, 28], "packed": True},
    "a pack of one sample": {"packed": True},
    "padding of its own": {"lengths": [45]},
    "split by cost": {"split": _split_otherwise},
    "chunks that are not equal": {"length": 46},
    "float32": {"dtype": torch.float32},
    "wide heads": {"dim": 136},
    "odd heads": {"dim": 12},
    "kernels that are torch's": {"changes": {"attention_backend": AttnBackend.unfused}},
}


def _others(rank: int) -> dict[str, tuple[bool, bool]]:
    """Of each: whether the engine was asked, and whether that is what ContextAttention gives."""
    return {name: _other(rank, **given) for name, given in {"padded": {}, **OTHERS}.items()}


def _other(
    rank: int,
    *,
    lengths: tuple[int, ...] = (),
    length: int = LENGTH,
    split: Any = None,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    dim: int = DIM,
    changes: dict[str, Any] | None = None,
) -> tuple[bool, bool]:
    parts = zigzag(length, cp=2) if split is None else split(2)
    row = context_row(parts, lengths or (length,), rank=rank, device="cpu")
    mine = torch.from_numpy(parts.parts[rank].places)
    given = [x[mine] for x in drawn(dim=dim, dtype=dtype)[:3]]
    if packed:
        given = [x[:, 0] for x in given]
    params = PackedSegments(qkv_format="thd" if packed else "sbhd", context=row)
    module = attention(cp=2, kv_channels=dim, **changes or {})
    options = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": params}
    out = module(*given, None, **options)
    own = ContextAttention(
        *(module.config, 1, AttnMaskType.causal, "self"),
        pg_collection=SimpleNamespace(tp=ALONE.tp, cp=dist.group.WORLD),
    )
    return bool(module.calls), torch.equal(out, own(*given, None, **options))


@pytest.mark.quick
def test_all_other_rows_are_not() -> None:
    for found in run_ranks(_others, 2):
        asked, same = found.pop("padded")
        assert asked
        assert not same, "another kernel rounds otherwise"
        assert found == dict.fromkeys(OTHERS, (False, True))


def _kept(rank: int) -> tuple[Any, ...]:
    module = attention(cp=2)
    names = list(module.state_dict())
    sharded = module.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    missing = module.load_state_dict(module.state_dict())
    classes = [each.__name__ for each in type(module).__mro__[:4]]
    return names, sharded, tuple(missing), classes, module.given["cp_comm_type"]


def test_checkpoints_have_the_engines_names() -> None:
    """And where no way to come by keys is given, both have the same."""
    ((names, sharded, missing, classes, comm_type),) = run_ranks(_kept, 1)
    assert (names, sharded, missing) == (["_extra_state"], {}, ([], []))
    assert classes[1:] == ["EngineContext", "TEDotProductAttention", StandInAttention.__name__]
    assert comm_type == "all_gather"
