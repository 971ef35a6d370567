"""Cases of the rules in rules/megatron.py."""

from rule_cases.kinds import Cases

CASES: Cases = {
    "implementation": (
        [{"transformer_impl": "inference_optimized"}],
        [{"transformer_impl": "transformer_engine"}],
    ),
    "unsupported": (
        [
            {"mock_data": True},
            {"use_checkpoint_args": True},
            {"cuda_graph_impl": "local"},
            {"rerun_mode": "validate_results"},
            {"fp8": "e4m3"},
        ],
        [{"rerun_mode": "report_stats"}],
    ),
    "optimizer": ([{"optimizer": "muon"}, {"optimizer": "lion"}], [{"optimizer": "sgd"}]),
    "precision-aware-optimizer": (
        [{"device": "cuda", "distributed_backend": "nccl", "use_precision_aware_optimizer": True}],
        [{"use_precision_aware_optimizer": True}],  # the estimate of such a run
    ),
    "checkpoint-format": ([{"ckpt_format": "torch"}], []),
    "asynchronous-save": (
        [
            {"async_save": True, "async_strategy": "nvrx"},
            {
                "device": "cuda",
                "distributed_backend": "nccl",
                "async_save": True,
                "async_strategy": "nvrx",
            },
        ],
        [{"async_save": True, "async_strategy": "mcore"}, {"async_strategy": "nvrx"}],
    ),
}
