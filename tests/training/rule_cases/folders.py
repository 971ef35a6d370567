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
}
