"""Cases of the rules in rules/data.py."""

from rule_cases.kinds import Cases

CASES: Cases = {
    "data-given": (
        [
            {"train_data_path": None},
            {"train_data_path": []},
            {"data_path": [__file__]},
            {"train_data_path": ["0.5", __file__, __file__]},
            {"train_data_path": ["0.5", __file__, "-1", __file__]},
            {"valid_data_path": [__file__, "0.5"]},
            {"train_data_path": None, "data_path": [__file__], "valid_data_path": [__file__]},
        ],
        [
            {"valid_data_path": [__file__]},
            {"train_data_path": None, "data_path": [__file__, __file__]},
            {"train_data_path": ["0.5", __file__, "2", __file__]},
        ],
    ),
    "data-exists": (
        [
            {"train_data_path": ["/nope"]},
            {"valid_data_path": ["/nope"]},
            {"train_data_path": ["1", __file__, "2", "/nope"]},
            {"media_root": "/nope"},
        ],
        [
            {"train_data_path": ["1", __file__, "2", __file__], "media_root": "/"},
            # Whether these are there is known once they are opened.
            {"train_data_path": ["s3://bucket/a.jsonl"], "media_root": "s3://bucket/images"},
        ],
    ),
    "energon": (
        [
            {"train_data_path": ["/"]},
            {"valid_data_path": ["1", __file__, "2", "/"]},
            {"dataloader_type": "energon", "train_data_path": ["/"]},
        ],
        [{"train_data_path": ["1", __file__, "2", __file__]}],
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
    "data-loading": ([{"dataloader_type": "cyclic"}], []),
    "tokenizer-type": (
        [{"tokenizer_type": "TikTokenizer"}],
        [{"tokenizer_type": "HuggingFaceTokenizer"}],
    ),
    "evaluation": (
        [{"eval_iters": 3}, {"eval_iters": -1}],
        [{"eval_iters": 3, "valid_data_path": [__file__]}, {"eval_iters": 3, "valid_share": 0.1}],
    ),
    "valid-share": (
        [{"valid_share": 0.1, "valid_data_path": [__file__]}],
        [{"valid_share": 0.1}, {"valid_data_path": [__file__]}],
    ),
    "eval-generate": (
        [
            {"eval_generate": 5},
            {"eval_generate": 0, "eval_iters": 3, "valid_data_path": [__file__]},
            {"eval_generate": -1, "eval_iters": 3, "valid_data_path": [__file__]},
            {"eval_generate": 5, "valid_data_path": [__file__]},
        ],
        [
            {"eval_generate": 5, "eval_iters": 3, "valid_data_path": [__file__]},
            {"eval_generate": 5, "eval_iters": None, "valid_data_path": [__file__]},
        ],
    ),
}
