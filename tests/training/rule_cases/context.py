"""Cases of the rules in rules/context.py."""

from rule_cases.kinds import LAYOUT, TP, Cases

_CP = {**LAYOUT, "context_parallel_size": 2}
_PACKED = {**_CP, "packing": True, "micro_batch_size": 1}
_TP4 = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "num_query_groups": 4}
_CP_TP = {**TP, "context_parallel_size": 2}


def _lora(module: str) -> str:
    return f"{module}.lora={{'rank': 2, 'dropout': 0.1}}"


CASES: Cases = {
    "row-parts": (
        [
            {**_CP, "seq_length": 66},
            {**TP, "sequence_parallel": True, "seq_length": 63},
            {**LAYOUT, **_TP4, "context_parallel_size": 2, "seq_length": 60},
        ],
        [{**TP, "seq_length": 63}, {**LAYOUT, **_TP4, "context_parallel_size": 2}],
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
