"""The parity matrix's cells that are written by hand: encoders on ranks of their own, and mixtures.

Sizes are written as published tables have them, TP/PP/DP of the decoder, then of each encoder:
``2/1/2|1/1/4``. An encoder's ranks begin behind those of the modules before it.

:data:`A7` and :data:`A8` are the layouts of these tables in "Heterogeneous Parallelism for
Multimodal Large Language Model Training" (Karnati et al.), with four GPUs to each module. Its
section C.4 runs A8's colocated, both modules on the same eight ranks: TP and PP as they are, DP
doubled.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parity.cells import DENSE, EXPERTS, TWO, Cell, sizes_of
from parity.option_flags import APART, ENCODER_DP, FULL

A7 = (
    *("4/1/1|4/1/1", "2/1/2|2/1/2", "2/2/1|4/1/1", "1/1/4|1/1/4", "1/4/1|4/1/1", "1/4/1|1/1/4"),
    *("1/2/2|2/1/2", "4/1/1|1/1/4", "2/2/1|2/1/2", "2/1/2|1/1/4"),
)
A8 = {
    "4/1/1|4/1/1": "tp4_both",
    "2/1/2|2/1/2": "tp2_dp2_both",
    "2/2/1|4/1/1": "tp2_pp2_llm_tp4_vision",
    "1/4/1|4/1/1": "pp4_llm_tp4_vision",
    "1/2/2|2/1/2": "pp2_dp2_llm_tp2dp2_vis",
    "2/2/1|2/1/2": "tp2_pp2_llm_tp2_dp2_vis",
    "1/4/1|2/1/2": "pp4_llm_tp2dp2_vision",
    "4/1/1|2/1/2": "tp4_llm_tp2dp2_vision",
}
# The published tables have LLaVA; deepstack's features are more to send.
PUBLISHED_MODELS = ("llava_tiny", DENSE)
_A7_FREEZES = "all but the decoder"


def placed(sizes: str, *, model: str = DENSE, **options: Any) -> Cell:
    """The cell of these sizes, with all encoders on ranks of their own."""
    decoder, _, own = sizes.partition("|")
    tp, pp, dp = sizes_of(decoder)
    layout: dict[str, Any] = {
        "mode": APART,
        "encoder_tp": tp,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "own": own,
    }
    return Cell(model=model, **layout, **options)


def published(cell: Cell) -> str:
    """The published layout that the cell is of, if there is one."""
    if (cell.vpp, cell.ep, cell.cp) != (1, 1, 1):
        return ""
    if cell.own:
        sizes = f"{cell.tp}/{cell.pp}/{cell.dp}|{cell.own}"
        if sizes in A7 and (cell.trained, cell.micro_batch) == (_A7_FREEZES, 1):
            return f"A7 {sizes}"
        alike = sizes in A8 and (cell.trained, cell.micro_batch, cell.ranks) == ("all", 2, 8)
        return f"A8 {sizes}" if alike else ""
    if cell.mode != FULL or cell.dp % 2:
        return ""
    encoder_dp = cell.ranks // cell.encoder_tp // 2
    sizes = f"{cell.tp}/{cell.pp}/{cell.dp // 2}|{cell.encoder_tp}/1/{encoder_dp}"
    return f"A8 {A8[sizes]}" if sizes in A8 and cell.ranks == 8 else ""


def placement_cells() -> Iterator[Cell]:
    """Cells with all encoders on ranks of their own."""
    for model in PUBLISHED_MODELS:
        yield from (placed(sizes, model=model, trained=_A7_FREEZES) for sizes in A7)
        yield from (placed(sizes, model=model, micro_batch=2) for sizes in A8)
    for subject in _PLACEMENTS.values():
        yield from (placed(sizes, **options) for sizes, options in subject)


_SPLIT: dict[str, Any] = {"model": EXPERTS, "sequence_parallel": True, "ep": 2}
_PLACEMENTS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "numbers of replicas that differ; where samples are few, one encodes a blank": (
        ("1/1/2|1/1/3", {"micro_batch": 3}),
        ("1/1/2|1/1/3", {"micro_batch": 1}),  # one without samples
        ("1/1/3|1/1/2", {"micro_batch": 2}),
        ("1/1/3|1/1/2", {"micro_batch": 1}),  # a sample and a half each
        ("1/1/1|1/1/4", {"micro_batch": 4}),
        ("1/1/1|1/1/4", {"micro_batch": 3}),  # one without samples
        ("1/1/4|1/1/1", {}),
        ("1/1/4|1/1/1", {"micro_batch": 2, "optimizer": "overlapped"}),
        ("2/1/2|1/1/3", {"micro_batch": 3, "sequence_parallel": True}),
    ),
    "decoders of several stages, of virtual ones too": (
        ("1/2/1|1/1/1", {}),
        ("1/2/1|1/1/2", {"micro_batch": 2, "tied": True, "optimizer": "overlapped"}),
        ("1/4/1|1/1/2", {"micro_batch": 2}),
        ("1/2/1|1/1/1", {"vpp": 2}),
        ("1/2/1|2/1/1", {"vpp": 4, "recompute": "both"}),
        ("1/2/2|1/1/1", {"vpp": 2, "optimizer": "distributed"}),
        ("1/2/2|1/1/3", {"micro_batch": 3, "vpp": 2, "tied": True}),
        ("1/4/1|1/1/1", {"vpp": 2}),
        (
            "2/2/1|1/1/2",
            {"micro_batch": 2, "vpp": 2, "sequence_parallel": True, "recompute": "encoder"},
        ),
    ),
    "decoders with experts": (
        ("1/1/1|1/1/1", {"model": EXPERTS}),
        ("1/1/2|1/1/1", {"model": EXPERTS, "ep": 2}),
        (
            "1/1/2|1/1/3",
            {"model": EXPERTS, "ep": 2, "micro_batch": 3, "optimizer": "overlapped"},
        ),
        ("2/1/1|1/1/2", {**_SPLIT, "micro_batch": 2}),
        ("1/2/2|2/1/1", {"model": EXPERTS, "ep": 2, "recompute": "both"}),
        ("2/2/1|1/1/1", {**_SPLIT, "vpp": 2}),
        ("1/1/2|1/1/1", {"model": EXPERTS, "ep": 2, "overlap": True}),
        ("1/2/2|1/1/2", {"model": EXPERTS, "ep": 2, "vpp": 2, "overlap": True}),
    ),
    "what trains, how it is kept, and which part of the sequence a rank has": (
        ("1/1/1|1/1/1", {"trained": "all but the encoder"}),
        ("1/1/1|1/1/1", {"trained": "the decoder"}),  # nothing goes back
        (
            "2/1/1|1/1/2",
            {"micro_batch": 2, "trained": "decoder's LoRA", "sequence_parallel": True},
        ),
        ("1/2/1|2/1/1", {"trained": "LoRA of all modules"}),
        ("1/1/2|1/1/1", {"trained": "norms, biases, last layer", "optimizer": "distributed"}),
        ("2/1/1|1/1/1", {"sequence_parallel": True}),
        ("2/1/1|2/1/1", {"sequence_parallel": True, "optimizer": "overlapped", "tied": True}),
        ("4/1/1|1/1/2", {"micro_batch": 2, "sequence_parallel": True, "recompute": "encoder"}),
        ("2/1/1|4/1/1", {"recompute": "decoder"}),
        ("2/1/1|1/1/2", {"micro_batch": 2, "model": "qwen2_5_vl_tiny"}),
        ("1/2/1|2/1/1", {"model": "siglip2_qwen3_tiny"}),
        ("1/1/2|1/1/3", {"micro_batch": 3, "model": "internvl_tiny"}),
        ("1/1/2|2/1/1", {"micro_batch": 2, "model": "qwen2_audio_tiny"}),
    ),
    "two encoders, and steps in which one of them, or all, have nothing to encode": (
        ("1/1/1|1/1/2", {"micro_batch": 2, "media": "text first"}),
        ("1/2/1|1/1/1", {"vpp": 2, "media": "text first", "optimizer": "overlapped"}),
        ("1/1/2|1/1/1", {"media": "text"}),
        ("1/1/1|1/1/1|1/1/1", {"model": TWO}),
        ("1/2/1|1/1/2|2/1/1", {"model": TWO, "micro_batch": 2}),
        ("1/2/1|1/1/1|1/1/1", {"model": TWO, "vpp": 2}),
        ("2/2/1|2/1/1|1/1/2", {"model": TWO, "micro_batch": 2, "recompute": "both"}),
        ("2/1/1|2/1/1|1/1/2", {"model": TWO, "micro_batch": 2, "sequence_parallel": True}),
        ("1/1/2|1/1/3|1/1/1", {"model": TWO, "micro_batch": 3, "optimizer": "overlapped"}),
        ("1/1/1|1/1/2|1/1/1", {"model": TWO, "micro_batch": 2, "media": "images"}),
        ("1/2/1|1/1/1|1/1/1", {"model": TWO, "media": "sounds"}),
        ("1/1/1|1/1/1|1/1/2", {"model": TWO, "micro_batch": 2, "media": "text first"}),
    ),
    "encoders with pipeline stages, beside decoders of every kind": (
        ("1/1/2|1/2/3", {"micro_batch": 3}),
        ("1/1/3|1/2/2", {"micro_batch": 1}),  # a sample and a half each
        ("1/1/1|1/2/3", {"micro_batch": 2}),  # one without samples
        ("1/1/4|1/2/1", {}),
        ("1/1/1|1/3/1", {"recompute": "both"}),
        ("1/2/1|1/2/1", {"tied": True, "optimizer": "overlapped"}),
        ("2/2/1|2/2/1", {"vpp": 2, "sequence_parallel": True}),
        ("1/1/1|1/2/1", {"trained": "all but the encoder"}),  # nothing comes back to a stage
        ("1/1/1|1/2/1", {"trained": "the decoder"}),
        ("1/2/1|1/2/1", {"model": "llava_tiny"}),
        ("1/1/1|1/2/1", {"model": "qwen2_audio_tiny"}),
        ("1/1/2|1/2/1", {"model": EXPERTS, "ep": 2}),
        ("2/1/1|1/2/2", {**_SPLIT, "micro_batch": 2}),
        ("1/2/2|1/2/1", {"model": EXPERTS, "ep": 2, "vpp": 2, "overlap": True}),
    ),
    "encoders with stages that have nothing to encode, one of two or all of them": (
        ("1/1/1|1/2/1", {"media": "text"}),
        ("1/2/1|1/2/1", {"vpp": 2, "media": "text first", "optimizer": "overlapped"}),
        ("1/3/1|1/2/1|1/1/1", {"model": TWO}),  # figure 4(a) of the MIMO paper
        ("1/1/1|1/2/1|1/2/1", {"model": TWO, "media": "images"}),
        ("1/1/2|1/1/1|1/2/2", {"model": TWO, "media": "sounds"}),
        ("1/1/1|1/2/1|1/1/1", {"model": TWO, "media": "text first"}),
    ),
}

_ROWS_SHARED = Cell(model=DENSE, mode=FULL, cp=2, pp=2, schedule="streamed")
# Two stages of two ranks a row: rows and both splits of packs, each way to come by keys.
STREAMED_CONTEXT = (
    _ROWS_SHARED,
    replace(
        replace(_ROWS_SHARED, vpp=2, rows="packs, lpt", comm="a2a"),
        recompute="both",
        optimizer="overlapped",
    ),
    replace(_ROWS_SHARED, model=EXPERTS, ep=2, rows="packs, zigzag", comm="p2p"),
)

_OVERLAPPED = Cell(model=EXPERTS, ep=2, cp=2, overlap=True)
_CHUNKS = replace(_OVERLAPPED, pp=2, vpp=2)  # stages without virtual ones are refused
# Every mode, split, way to come by keys and thing that is kept; experts on the ranks of a row.
OVERLAPPED_CONTEXT = (
    replace(_OVERLAPPED, cp=4, ep=4, rows="packs, zigzag", comm="a2a", trained="decoder's LoRA"),
    replace(_OVERLAPPED, mode=FULL, cp=3, dp=2, rows="packs, lpt", kept="tensors away"),
    replace(_CHUNKS, optimizer="overlapped", recompute="encoder"),
    replace(_CHUNKS, mode=ENCODER_DP, rows="packs, zigzag", comm="p2p", kept="nodes recomputed"),
    replace(_CHUNKS, mode=FULL, rows="packs, lpt", comm="a2a", kept="both", delayed=True),
    replace(_CHUNKS, mode=APART, own="1/1/1", trained="all but the encoder", delayed=True),
    replace(_CHUNKS, tp=2, ep=4, sequence_parallel=True, comm="p2p", delayed=True),
)
