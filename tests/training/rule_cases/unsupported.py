"""Cases of the rules in rules/unsupported.py."""

from rule_cases.kinds import Cases

CASES: Cases = {
    "unsupported": (
        [
            {"mock_data": True},
            {"use_checkpoint_args": True},
            {"cuda_graph_impl": "local"},
            {"rerun_mode": "validate_results"},
        ],
        [{"rerun_mode": "report_stats"}],
    ),
}
