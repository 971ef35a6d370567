"""A checkpoint that an earlier LoongPlug has saved goes on, with the metrics that it had then.

``before/`` is of 2026-11-22, before models were lists of entries: ``checkpoint.tar.xz`` of two
steps with ``FLAGS`` and ``SAVED`` on two ranks, ``metrics.json`` what ``GOES_ON`` then gave. Its
``.metadata`` was written by torch 2.15, and again as torch 2.14 writes it: older releases do not
read the strides that newer ones note.
"""

import json
import math
import tarfile
from pathlib import Path

import pytest
from ranks import run_ranks

from loongplug.data.fingerprint import processor_digest

BEFORE = Path(__file__).parent / "before"
# As small as a model may be: two decoder layers, one encoder layer that deepstack taps.
FLAGS = (
    *("--seq-length", "80", "--use-distributed-optimizer"),
    *("model.foundation.num_layers=2", "model.foundation.hidden_size=16"),
    *("model.foundation.ffn_hidden_size=16", "model.foundation.num_attention_heads=2"),
    *("model.foundation.num_query_groups=1", "model.foundation.kv_channels=8"),
    *("model.foundation.mrope_section=[2,1,1]", "model.foundation.tie_word_embeddings=true"),
    *("model.image_encoder.num_layers=1", "model.image_encoder.hidden_size=16"),
    *("model.image_encoder.ffn_hidden_size=16", "model.image_encoder.num_attention_heads=2"),
    *("model.image_encoder.deepstack_layers=[0]", "model.image_encoder.lr_mult=0.5"),
    "model.image_encoder.num_position_embeddings=16",
)
SAVED = ("--pipeline-model-parallel-size", "2", "--enable-full-hetero-dp")
GOES_ON = ("--train-iters", "4", "--override-opt-param-scheduler")
GOES_ON += ("--eval-interval", "2", "--eval-iters", "1")
SHORTER = ("chat_template.jinja", "preprocessor_config.json", "video_preprocessor_config.json")
# By the ends of keys: what a machine decides, and what padded rows that are no longer than needed
# have made larger.
MEASURED = ("per_second", "seconds", "fill_rate")


def train(rank: int, *, flags: list[str]) -> None:
    from loongplug.training.run import run

    run(flags)


@pytest.mark.slow
def test_a_checkpoint_of_before_goes_on_as_it_did(run_flags: list[str], tmp_path: Path) -> None:
    """With the demo's processor of today, whose files are shorter and make the same tokens."""
    with tarfile.open(BEFORE / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    note = tmp_path / "loongplug_data.json"
    folder = Path(run_flags[run_flags.index("--tokenizer-model") + 1])
    noted, now = json.loads(note.read_text()), processor_digest(folder)
    noted["processor"] |= {name: now[name] for name in SHORTER}
    note.write_text(json.dumps(noted))
    metrics = tmp_path / "metrics.json"
    loads = ["--load", str(tmp_path), "--metrics-json", str(metrics)]
    run_ranks(train, 1, flags=[*run_flags, *FLAGS, *GOES_ON, *loads], timeout=120.0)
    found, expected = (json.loads(path.read_text()) for path in (metrics, BEFORE / "metrics.json"))
    assert expected.keys() <= found.keys()
    for key, value in expected.items():
        if key.endswith(MEASURED):
            continue
        if isinstance(value, float):
            assert math.isclose(found[key], value, rel_tol=1e-4), key
        else:
            assert found[key] == value, key
