"""Where a head's rows lie when the host's attention reads them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_configs import decoder_config
from megatron.core.transformer.spec_utils import build_module
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.models.layers.attention import by_heads
from loongplug.models.layers.inputs import pack_segments, rope_table
from loongplug.models.layers.specs import decoder_layer_spec
from loongplug.platform import devices


@pytest.mark.quick
def test_what_has_no_values_lies_as_on_the_runs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = torch.empty(5, 3, 2, 8, device="meta").permute(1, 2, 0, 3)
    monkeypatch.setattr(devices, "is_host", lambda: False)
    assert by_heads(apart) is apart
    monkeypatch.setattr(devices, "is_host", lambda: True)
    assert by_heads(apart).stride() == (80, 40, 8, 1)


def _what_the_kernel_reads(rank: int, *, packed: bool) -> None:
    read: list[Tensor] = []
    kernel = F.scaled_dot_product_attention

    def looked_at(*tensors: Tensor, **options: Any) -> Tensor:
        read.extend(tensors)
        return kernel(*tensors, **options)

    with model_parallel(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", looked_at)
        config = decoder_config()
        spec = decoder_layer_spec(config, backend="local").submodules.self_attention
        attention = build_module(spec, config=config, layer_number=1)
        s, b = (10, 1) if packed else (6, 3)
        attention(
            torch.randn(s, b, config.hidden_size),
            None,
            rotary_pos_emb=rope_table(torch.randn(s, b, 1, 4), dtype=torch.float32),
            packed_seq_params=pack_segments([5, 5], device="cpu") if packed else None,
        )
    assert len(read) == 3
    assert all(each.stride(-2) == each.size(-1) for each in read)


@pytest.mark.parametrize("packed", [False, True])
def test_the_hosts_kernel_reads_a_heads_rows_together(packed: bool) -> None:
    run_ranks(_what_the_kernel_reads, 1, packed=packed)
