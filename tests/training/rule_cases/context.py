"""Cases of the rules in rules/context.py."""

from rule_cases.decoder_memory import NAMED
from rule_cases.kinds import LAYOUT, TP, Cases

_CP = {**LAYOUT, "context_parallel_size": 2}
_PACKED = {**_CP, "packing": True, "micro_batch_size": 1}
_CP_TP = {**TP, "context_parallel_size": 2}


def _lora(module: str) -> str:
    return f"{module}.lora={{'rank': 2, 'dropout': 0.1}}"


CASES: Cases = {
    "context-parallel-parts": (
        [
            {**_CP, "hybrid_context_parallel": True},
            {**_CP, "hierarchical_context_parallel_sizes": [2, 1]},
        ],
        [
            _CP,
            {**_CP, "eval_generate": 1, "eval_iters": 3, "valid_data_path": [__file__]},
            {**_CP, **NAMED},
            {**_CP, "enable_full_hetero_dp": True},
            {**_CP_TP, "enable_encoder_hetero_dp": True},
        ],
    ),
    "context-parallel-length": (
        [{**_CP, "seq_length": 66}, {**_CP_TP, "sequence_parallel": True, "seq_length": 66}],
        [{**_CP, "seq_length": 68}, {**LAYOUT, "seq_length": 66}],
    ),
    "context-parallel-communication": (
        [
            {**_CP, "cp_comm_type": ["a2a+p2p"]},
            {**_CP, "cp_comm_type": ["p2p", "a2a"]},
            {**_CP_TP, "cp_comm_type": ["a2a"]},
        ],
        [
            {**_CP, "cp_comm_type": ["a2a"]},
            {**_CP_TP, "cp_comm_type": ["p2p"]},
            {**TP, "cp_comm_type": ["a2a+p2p"]},
        ],
    ),
    "context-parallel-balance": (
        [
            {**_CP, "cp_balance": "lpt"},
            {**_PACKED, "cp_balance": "lpt", "cp_comm_type": ["p2p"]},
        ],
        [
            {**_PACKED, "cp_balance": "lpt"},
            {**LAYOUT, "cp_balance": "lpt"},
        ],
    ),
    "context-parallel-dropout": (
        [
            {**_CP, "attention_dropout": 0.1},
            {**_CP, "hidden_dropout": 0.1},
            {**_CP, "model": [_lora("foundation")]},
        ],
        [
            {**LAYOUT, "attention_dropout": 0.1},
            {**LAYOUT, "model": [_lora("foundation")]},
            # An encoder's may drop: its ranks have the same media.
            {**_CP, "model": [_lora("image_encoder"), _lora("image_projector")]},
        ],
    ),
}
