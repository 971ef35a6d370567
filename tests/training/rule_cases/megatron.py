"""Cases of the rules in rules/megatron.py."""

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
    "optimizer": ([{"optimizer": "muon"}, {"optimizer": "lion"}], [{"optimizer": "sgd"}]),
    "wandb": ([], [{"wandb_project": "charts", "save": "/run"}]),
    "wandb-folder": (
        [{"wandb_project": "charts"}],
        [
            {"wandb_project": "charts", "save": "/run"},
            {"wandb_project": "charts", "wandb_save_dir": "/run"},
        ],
    ),
    "sharded-optimizer": (
        [{"optimizer": "sgd", "use_distributed_optimizer": True}],
        [{"use_distributed_optimizer": True}],
    ),
    "precision-aware-optimizer": (
        [{"device": "cuda", "distributed_backend": "nccl", "use_precision_aware_optimizer": True}],
        [{"use_precision_aware_optimizer": True}],  # the estimate of such a run
    ),
    "precision": ([{"fp16": True}, {"fp8": "e4m3"}, {"fp4": "e2m1"}], [{"bf16": True}]),
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
    "backend": (
        [{"distributed_backend": "nccl"}, {"device": "cuda"}],
        [{"distributed_backend": "nccl", "device": "cuda"}],
    ),
    "transformer-engine": (
        [{"transformer_impl": "transformer_engine"}, {"transformer_impl": "inference_optimized"}],
        [],
    ),
}
