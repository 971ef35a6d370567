"""What a case is: changes that make a valid run violate one rule, or that come close to it.

Every rule has a pair of lists: what violates it and nothing else, and similar runs that are valid.
"""

from typing import Any

# Changes to the arguments of a run. With experts, the run is one of 8 ranks, and has 8 experts of
# width 96, 2 per token.
Cases = dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]
# A tensor parallel size, and changes to the model.
OverrideCases = dict[str, tuple[list[tuple[int, list[str]]], list[tuple[int, list[str]]]]]

LAYOUT = {"world_size": 8, "global_batch_size": 16}
TP = {**LAYOUT, "tensor_model_parallel_size": 2}
PP = {**LAYOUT, "pipeline_model_parallel_size": 2}
