"""Cases of the rules in rules/layout.py."""

from rule_cases.kinds import PP, TP, Cases, OverrideCases

CASES: Cases = {
    "world-size": (
        [{**TP, "world_size": 7}, {**PP, "world_size": 3}],
        [TP, {**TP, **PP}, {**TP, "world_size": 6, "global_batch_size": 12}],
    ),
    "sequence-parallel": (
        [{**TP, "sequence_parallel": True, "seq_length": 63}],
        [{**TP, "sequence_parallel": True}, {**TP, "seq_length": 63}],
    ),
}

OVERRIDES: OverrideCases = {
    "decoder-heads": (
        [
            (4, []),
            (2, ["foundation.num_attention_heads=5", "foundation.num_query_groups=1"]),
            (2, ["foundation.num_query_groups=1"]),
        ],
        [
            (4, ["foundation.num_query_groups=4"]),
            (2, ["foundation.num_attention_heads=6"]),
        ],
    ),
    "decoder-ffn": (
        [(2, ["foundation.ffn_hidden_size=383"])],
        [(1, ["foundation.ffn_hidden_size=383"])],
    ),
    "vocabulary": ([(2, ["foundation.vocab_size=129"])], [(2, ["foundation.vocab_size=130"])]),
}
