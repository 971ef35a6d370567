"""Cases of the rules in rules/start.py."""

from pathlib import Path

from rule_cases.kinds import Cases, OverrideCases

CASES: Cases = {
    "required-flags": (
        [
            {name: None}
            for name in ("training_phase", "seq_length", "micro_batch_size", "lr", "train_iters")
        ],
        [{"global_batch_size": None}, {"train_iters": None, "epochs": 2}],
    ),
    "run-length": ([{"epochs": 2}], [{"train_iters": None, "epochs": 2}]),
    "positive-numbers": (
        [
            {"seq_length": 0},
            {"train_iters": 0},
            {"train_iters": None, "epochs": 0},
            {"packing_look_ahead": 0},
            {"tensor_model_parallel_size": -1},
            {"tensor_model_parallel_size": 0},
            {"pipeline_model_parallel_size": 0, "context_parallel_size": 0},
            {"ckpt_step": 0},
        ],
        [{"seq_length": 1}, {"ckpt_step": 1}],
    ),
    "empty-places": (
        [{"save": ""}, {"save_hf": ""}, {"trace": ""}, {"metrics_json": ""}],
        [],
    ),
    "kept-checkpoints": (
        [
            {"keep_checkpoints": 2},
            {"keep_checkpoints": 2, "save": "/run", "save_retain_interval": 4},
        ],
        [{"keep_checkpoints": 2, "save": "/run"}, {"save_retain_interval": 4}],
    ),
    "tokenizer-folder": ([{"tokenizer_model": None}, {"tokenizer_model": "/nowhere"}], []),
    "hf-folder": ([{"load_hf": "/nope"}], []),
    "checkpoint-to-load": ([{"load": "/nope"}], [{"load": "/nope", "save": "/nope"}]),
    "hf-own-folder": (
        [
            {"save_hf": "/run/hf", "save": "/run/hf"},
            {"save_hf": "/run/hf", "save": "/run/hf/checkpoints"},
            {"save_hf": "/run/hf", "metrics_json": "/run/hf/../hf/metrics.json"},
            {"save_hf": "/run/hf", "trace": "/run/hf/trace"},
            {"save_hf": str(Path.cwd())},
            {"save_hf": "/run/../"},
        ],
        [
            {"save_hf": "/run/hf", "save": "/run", "metrics_json": "/run/metrics.json"},
            {"save": "/run/checkpoints", "metrics_json": "/run/checkpoints/metrics.json"},
            {"save_hf": str(Path.cwd() / "hf"), "media_root": str(Path.cwd())},
        ],
    ),
    "learning-rates": ([{"min_lr": 1.0}], [{"min_lr": 1e-3}]),
    "warm-up": (
        [
            {"train_iters": 10, "lr_warmup_iters": 10},
            {"train_iters": 99, "lr_decay_iters": 10, "lr_warmup_iters": 10},
        ],
        [{"train_iters": 10, "lr_warmup_iters": 9}],
    ),
    "sequence-length": ([{"seq_length": 4097}], [{"seq_length": 4096}]),
}

OVERRIDES: OverrideCases = {
    "tokenizer-fits": (
        [
            (1, ["image_token_id=6"]),
            (1, ["foundation.vocab_size=99"]),
        ],
        [(1, ["image_token_id=5", "vision_end_token_id=4"]), (1, ["foundation.vocab_size=100"])],
    ),
}
