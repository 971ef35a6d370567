"""Which flags each of the two runs gets."""

import pytest

from loongplug.training.flags import read_command_line, whole_parser, without_flags
from loongplug.verify.flags import (
    LAYOUT,
    OUTPUT,
    REPLACED,
    SOURCES,
    common_flags,
    reference_flags,
)

pytestmark = pytest.mark.quick


def test_every_name_is_one_of_a_flag():
    known = {action.dest for action in whole_parser()._actions}
    assert known >= (OUTPUT | REPLACED | LAYOUT | SOURCES)


def test_flags_go_with_their_values():
    kept = without_flags(
        [
            *("--bf16", "model.x=1", "--recompute-modules", "moe", "core_attn", "model.y=2"),
            *("--tensor-model-parallel-size", "2", "--lr=1", "--seed", "3", "--sequence-parallel"),
            *("--data-path", "a=b", "--unknown", "4", "--save", "a=b"),
        ],
        {
            "save",
            "recompute_modules",
            "tensor_model_parallel_size",
            "lr",
            "bf16",
            "sequence_parallel",
        },
    )
    assert kept == ["model.x=1", "model.y=2", "--seed", "3", "--data-path", "a=b", "--unknown", "4"]


def test_the_reference_has_nothing_parallel():
    layout = [
        *("--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2"),
        *("--num-virtual-stages-per-pipeline-rank", "2", "--expert-model-parallel-size", "2"),
        *("--expert-tensor-parallel-size", "1", "--sequence-parallel"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1", "--micro-batch-size", "2", "--adam-beta2", "0.9"),
        *("model.image_encoder.recompute=true", "model.foundation.tie_word_embeddings=true"),
    ]
    line = read_command_line(
        reference_flags(layout, global_batch_size=16, encoders=("image_encoder",))
    )
    assert set(line.flags) == {"micro_batch_size", "adam_beta2", "global_batch_size"}
    assert (line.args.global_batch_size, line.args.micro_batch_size) == (16, 2)
    assert line.overrides[-1] == "model.image_encoder.recompute=false"
    assert "model.foundation.tie_word_embeddings=true" in line.overrides


def test_nothing_is_written_and_nothing_is_rounded():
    given = ["--bf16", "--save", "run", "--lr-warmup-iters", "100", "--hidden-dropout", "0.1"]
    line = read_command_line(common_flags([*given, "--lr", "1e-5"], steps=3, drop_sources=True))
    assert not {"save", "bf16", "lr_warmup_iters"} & set(line.flags)
    assert (line.args.train_iters, line.args.hidden_dropout, line.args.lr) == (3, 0.0, 1e-5)


def test_the_users_weights_stay_unless_the_model_is_another():
    given = ["--load-hf", "folder"]
    assert "--load-hf" in common_flags(given, steps=1, drop_sources=False)
    assert "--load-hf" not in common_flags(given, steps=1, drop_sources=True)
