"""The whole command: what it prints, writes and ends with."""

import json
from functools import partial

import pytest
from typer.testing import CliRunner
from verify_cases import TINY, mutated

from loongplug.cli import app
from loongplug.verify.command import AGREES, DIFFERS, verify
from loongplug.verify.plan import Request


def invoke(*arguments):
    result = CliRunner().invoke(app, ["verify", *arguments])
    return result.exit_code, result.output


def test_a_layout_that_agrees(demo, tmp_path):
    """Shards of gradients and state come from two data parallel ranks; data are the user's."""
    code, printed = invoke(
        *("--scale", "tiny", "--steps", "2", "--ranks", "2", "--json", str(tmp_path / "r.json")),
        *("--model-name", "qwen3_vl_30b_a3b", "--device", "cpu", "--bf16"),
        *("--expert-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--training-phase", "sft"),
        *("--tokenizer-model", str(demo / "processor"), "--seq-length", "80"),
        *("--train-data-path", str(demo / "train.jsonl"), "--save", str(tmp_path / "never")),
        *("--micro-batch-size", "1", "--global-batch-size", "64", "--lr", "1e-5"),
    )
    assert code == AGREES, printed
    assert printed.splitlines()[-1].startswith("verdict: agrees")
    assert "qwen3_vl_30b_a3b: 2 cpu rank(s) against a single one" in printed
    assert "fp32 instead of --bf16" in printed
    assert "4 microbatches a replica instead of 32" in printed
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["agrees"]
    assert written["microbatches"] == 16
    assert set(written["modules"]) == {
        *("image_encoder", "image_projector", "text_decoder embeddings", "text_decoder layers"),
        *("text_decoder experts", "text_decoder head"),
    }
    for figures in written["modules"].values():
        assert 0 < figures["gradients"] < 1e-4
    assert not (tmp_path / "never").exists()


def scale_on_rank_1(rank):
    """One data parallel replica steps with another rate."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.step_with_ready_grads

    def step(self):
        if rank == 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.01
        return original(self)

    DistributedOptimizer.step_with_ready_grads = step


def test_a_layout_that_differs(tmp_path, capsys):
    """A wrong rate on one rank's shard: no gradient of the first step tells of it."""
    request = Request(flags=(*TINY, "--use-distributed-optimizer"), scale="tiny", steps=1, ranks=2)
    code = verify(
        request,
        json_path=tmp_path / "r.json",
        record_layout=partial(mutated, mutation=scale_on_rank_1),
    )
    assert code == DIFFERS
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("verdict: differs")
    written = json.loads((tmp_path / "r.json").read_text())
    assert {each["what"] for each in written["tensors"]} == {"parameters"}
    assert max(each["error"] for each in written["tensors"]) == pytest.approx(1e-2, rel=0.1)
    assert written["gradient_norm"] < 1e-5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tensor-model-paralel-size", "2"), "--tensor-model-parallel-size"),
        (("--tensor-model-parallel-size", "2", "--ranks", "3"), "a multiple of 2"),
        (("--scale", "small"), "expected tiny"),
        (("--steps", "0"), "1 or more"),
        (("--optimizer", "sgd"), "only adam"),
        (("--keep", "."), "is not empty"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_compared_is_exit_code_2(flags, said):
    code, printed = invoke("--scale", "tiny", *TINY, *flags)
    assert code == 2
    assert said in printed
    assert "Traceback" not in printed


def test_a_failing_rank_is_exit_code_2(tmp_path, demo):
    code, printed = invoke(
        *TINY,
        *("--tokenizer-model", str(demo / "processor"), "--train-data-path", "none.jsonl"),
        *("--lr", "1e-3", "--training-phase", "sft", "--micro-batch-size", "1"),
    )
    assert code == 2
    assert "none.jsonl" in printed
