"""What a case is: changes that make a valid run violate one rule, or that come close to it.

Every rule has a pair of lists: what violates it and nothing else, and similar runs that are valid.
A file's tables are of different runs: ``CASES`` of a dense model on one rank, ``WITH_EXPERTS`` of
8 experts of width 96, 2 per token, on 8 ranks, ``OMNI`` and ``QWEN2_5`` of these families.
"""

from typing import Any

# Changes to the arguments of a run; under "model", overrides of the model.
Case = dict[str, Any]
Cases = dict[str, tuple[list[Case], list[Case]]]

LAYOUT = {"world_size": 8, "global_batch_size": 16}
TP = {**LAYOUT, "tensor_model_parallel_size": 2}
PP = {**LAYOUT, "pipeline_model_parallel_size": 2}


def model(*overrides: str, tp: int = 1, **changes: Any) -> Case:
    """Overrides of the model, and further changes, in a run of 4 ranks."""
    layout = {**LAYOUT, "world_size": 4, "tensor_model_parallel_size": tp}
    return {**layout, "model": overrides, **changes}


def placed(*overrides: str, ranks: int = 10, **changes: Any) -> Case:
    """Overrides of the model, and further changes, in a run of 8 ranks of the decoder."""
    return {**LAYOUT, "ranks": ranks, "model": overrides, **changes}
