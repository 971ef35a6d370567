"""Step 2: kernels, forward and backward: attention over images, experts, AdamW."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gpu_steps.bench import Bench
from gpu_steps.models import config_of
from gpu_steps.rows import Rows
from gpu_steps.timing import attempt

type Pack = tuple[str, Sequence[int]]

_PASSES = 3  # forward, and backward of twice its operations


def run(bench: Bench) -> None:
    """Each kind in a process of its own: a kernel that faults takes those behind it along."""
    sizes = bench.sizes
    vision = config_of(sizes.frozen).image_encoder
    text = config_of(sizes.experts).foundation
    common = {"device": bench.device, "rows": bench.rows, "rounds": sizes.rounds}
    attention = {
        "packs": sizes.vision_packs,
        "heads": vision.num_attention_heads,
        "dim": vision.hidden_size // vision.num_attention_heads,
    }
    bench.attempt("attention", attention_kernels, **common, **attention)
    bench.attempt("varlen attention", varlen_kernel, **common, **attention)
    bench.attempt("AdamW", adam_kernels, **common, elements=sizes.adam_elements)
    bench.attempt(
        "experts",
        expert_kernels,
        **common,
        experts=text.num_experts,
        hidden=text.hidden_size,
        width=text.expert_ffn_hidden_size,
        routed=sizes.routed_tokens * text.experts_per_token,
    )


def attention_kernels(
    *, device: str, rows: Rows, rounds: int, packs: Sequence[Pack], heads: int, dim: int
) -> None:
    """The encoder's attention as it is, and with torch's kernels chosen."""
    from torch.nn.attention import SDPBackend

    attention = _attention(device, heads=heads, dim=dim)
    for kernel, backend in (
        ("as it is", None),
        ("FLASH", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        for name, lengths in packs:
            attempt(
                rows,
                f"attention {kernel}, {name}",
                partial(
                    _attends, attention, lengths, device=device, heads=heads, dim=dim, by=backend
                ),
                operations=_attention_operations(lengths, heads=heads, dim=dim),
                device=device,
                rounds=rounds,
            )


def varlen_kernel(
    *, device: str, rows: Rows, rounds: int, packs: Sequence[Pack], heads: int, dim: int
) -> None:
    """``torch.nn.attention.varlen``, where it is there; behind all others, for it may fault."""
    for name, lengths in packs:
        attempt(
            rows,
            f"attention varlen, {name}",
            partial(_varlen, lengths, device=device, heads=heads, dim=dim),
            operations=_attention_operations(lengths, heads=heads, dim=dim),
            device=device,
            rounds=rounds,
        )


def _attention_operations(lengths: Sequence[int], *, heads: int, dim: int) -> int:
    return _PASSES * 4 * sum(length**2 for length in lengths) * heads * dim


def _attention(device: str, *, heads: int, dim: int) -> Any:
    """The module, in a parallel state of one rank, which Megatron asks for."""
    from loongplug.platform import activate

    activate(device)
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from loongplug.models.layers.attention import SDPAttention

    # It sends nothing, so that gloo serves on a GPU, too.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    return SDPAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.no_mask,
        attention_type="self",
    )


def _inputs(lengths: Sequence[int], *, device: str, heads: int, dim: int) -> list[Tensor]:
    """Queries, keys and values, [tokens, heads, dim] each."""
    return [
        torch.randn(sum(lengths), heads, dim, device=device, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]


def _attends(
    attention: Any, lengths: Sequence[int], *, device: str, heads: int, dim: int, by: Any
) -> Callable[[], object]:
    from contextlib import nullcontext

    from torch.nn.attention import sdpa_kernel

    from loongplug.models.layers.inputs import pack_segments

    inputs = _inputs(lengths, device=device, heads=heads, dim=dim)
    gradient = torch.randn(sum(lengths), heads * dim, device=device, dtype=torch.bfloat16)
    segments = pack_segments(lengths, device=device)

    def both_passes() -> None:
        with nullcontext() if by is None else sdpa_kernel(by):
            output = attention(*inputs, None, packed_seq_params=segments)
        torch.autograd.grad(output, inputs, gradient)

    return both_passes


def _varlen(lengths: Sequence[int], *, device: str, heads: int, dim: int) -> Callable[[], object]:
    from torch.nn.attention.varlen import varlen_attn

    inputs = _inputs(lengths, device=device, heads=heads, dim=dim)
    gradient = torch.randn_like(inputs[0])
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def both_passes() -> None:
        query, key, value = inputs
        output = varlen_attn(query, key, value, ends, ends, longest, longest)
        torch.autograd.grad(output, inputs, gradient)

    return both_passes


def adam_kernels(*, device: str, rows: Rows, rounds: int, elements: int) -> None:
    """One update of fp32 parameters, as a list of tensors and as one kernel."""
    for kind in ("foreach", "fused"):
        attempt(
            rows,
            f"AdamW {kind}, {elements:,} elements",
            partial(_adam, device=device, elements=elements, kind=kind),
            operations=0,
            device=device,
            rounds=rounds,
        )


def _adam(*, device: str, elements: int, kind: str) -> Callable[[], object]:
    tensors = 16
    parameters = [torch.zeros(elements // tensors, device=device) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(parameters, foreach=kind == "foreach", fused=kind == "fused").step


def expert_kernels(
    *,
    device: str,
    rows: Rows,
    rounds: int,
    experts: int,
    hidden: int,
    width: int,
    routed: int,
) -> None:
    """SwiGLU experts over sorted tokens, one after the other and as grouped products."""
    torch.manual_seed(0)
    shares = torch.rand(experts).softmax(0)
    counts = torch.bincount(torch.multinomial(shares, routed, replacement=True), minlength=experts)
    for case, make in (("in sequence", _in_sequence), ("grouped", _grouped)):
        attempt(
            rows,
            f"{experts} experts {case}, {routed:,} rows",
            partial(make, counts.tolist(), device=device, hidden=hidden, width=width),
            operations=_PASSES * 2 * routed * 3 * hidden * width,
            device=device,
            rounds=rounds,
        )


def _expert_tensors(
    experts: int, *, rows: int, device: str, hidden: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, gates with ups, downs; the experts' stacked."""
    shapes = ((rows, hidden), (experts, hidden, 2 * width), (experts, width, hidden))
    one, two, three = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes
    )
    return one, two, three


def _in_sequence(
    counts: Sequence[int], *, device: str, hidden: int, width: int
) -> Callable[[], object]:
    rows, up, down = _expert_tensors(
        len(counts), rows=sum(counts), device=device, hidden=hidden, width=width
    )
    ups, downs = ([each.detach().requires_grad_() for each in all_] for all_ in (up, down))
    gradient = torch.randn_like(rows)

    def both_passes() -> None:
        pieces = rows.split(list(counts))
        outputs = [
            _swiglu(piece @ first) @ second
            for piece, first, second in zip(pieces, ups, downs, strict=True)
        ]
        torch.autograd.grad(torch.cat(outputs), [rows, *ups, *downs], gradient)

    return both_passes


def _grouped(
    counts: Sequence[int], *, device: str, hidden: int, width: int
) -> Callable[[], object]:
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    rows, up, down = _expert_tensors(
        len(counts), rows=sum(counts), device=device, hidden=hidden, width=width
    )
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)
    gradient = torch.randn_like(rows)

    def both_passes() -> None:
        inner = _swiglu(grouped(rows, up, offs=ends))
        torch.autograd.grad(grouped(inner, down, offs=ends), [rows, up, down], gradient)

    return both_passes


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
