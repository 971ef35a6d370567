"""Cases of the rules in rules/megatron.py."""

from rule_cases.kinds import Cases

CASES: Cases = {
    "values": (
        [
            {"transformer_impl": "inference_optimized"},
            {"optimizer": "muon"},
            {"ckpt_format": "torch"},
            {"tokenizer_type": "SentencePieceTokenizer"},
            {"dataloader_type": "cyclic"},
        ],
        [
            {"optimizer": "sgd", "dataloader_type": "energon"},
            {"tokenizer_type": "HuggingFaceTokenizer"},
        ],
    ),
    "transformer-engine": (
        [{"transformer_impl": "transformer_engine"}],
        [{"transformer_impl": "transformer_engine", "device": "cuda"}],
    ),
    "sharded-optimizer": (
        [{"optimizer": "sgd", "use_distributed_optimizer": True}],
        [{"optimizer": "sgd"}, {"use_distributed_optimizer": True}],
    ),
    "wandb-folder": (
        [{"wandb_project": "charts"}],
        [
            {"wandb_project": "charts", "save": "/run"},
            {"wandb_project": "charts", "wandb_save_dir": "/run"},
        ],
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
