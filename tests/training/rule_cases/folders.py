"""Cases of the rules in rules/folders.py."""

from pathlib import Path

from rule_cases.kinds import Cases, model

CASES: Cases = {
    "own-folder": (
        [
            {"save_hf": "/run/hf", "save": "/run/hf"},
            {"save_hf": "/run/hf", "metrics_json": "/run/hf/../hf/metrics.json"},
            {"save_hf": str(Path.cwd())},
            {"save_hf": "/run/../"},
        ],
        [
            {"save_hf": "/run/hf", "save": "/run", "metrics_json": "/run/metrics.json"},
            {"save_hf": str(Path.cwd() / "hf"), "media_root": str(Path.cwd())},
        ],
    ),
    "empty-places": ([{"save": ""}, {"save_hf": ""}], []),
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
    "tokenizer-fits": (
        [
            model("image_token_id=6"),
            model("foundation.vocab_size=99"),
        ],
        [model("image_token_id=5", "vision_end_token_id=4"), model("foundation.vocab_size=100")],
    ),
    "data-given": (
        [
            {"train_data_path": None},
            {"train_data_path": []},
            {"data_path": [__file__]},
            {"train_data_path": None, "data_path": [__file__], "valid_data_path": [__file__]},
        ],
        [{"train_data_path": None, "data_path": [__file__, __file__]}],
    ),
    "media-root": (
        [{"media_root": "/nope"}],
        [{"media_root": "/"}, {"media_root": "s3://bucket/images"}],
    ),
    "validation": (
        [
            {"eval_iters": 3},
            {"eval_generate": 5},
            {"eval_generate": 5, "valid_data_path": [__file__]},  # with --eval-iters 0
        ],
        [
            {"eval_iters": 3, "valid_share": 0.1},
            {"eval_generate": 5, "eval_iters": None, "valid_data_path": [__file__]},
        ],
    ),
    "video-rate": (
        [
            {"video_fps": 0.0},
            {"video_fps": -1.0},
            {"video_fps": 5e-324},
        ],
        [{"video_fps": 0.5}, {"video_fps": 1e-3}],
    ),
    "packing-rows": (
        [{"packing": True, "micro_batch_size": 2}],
        [{"packing": True, "micro_batch_size": 1}, {"micro_batch_size": 2}],
    ),
    "split-rows": (
        [{"multi_turn": "split"}],
        [{"multi_turn": "split", "packing": True, "micro_batch_size": 1}, {"multi_turn": "last"}],
    ),
    "valid-share": (
        [{"valid_share": 0.1, "valid_data_path": [__file__]}],
        [{"valid_share": 0.1}, {"valid_data_path": [__file__]}],
    ),
}
