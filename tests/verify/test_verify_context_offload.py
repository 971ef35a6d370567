"""Named activations of parts of rows on the host between forward and backward."""

from pathlib import Path

from verify_cases import Pair, made_plan

from loongplug.verify.report import report

OFFLOADED = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1024"),
    *("--offload-tensors", "layer_input", "qkv", "fc1_output", "fc2_input"),
)


def test_what_attention_saves_of_a_part_comes_back(tmp_path: Path) -> None:
    plan = made_plan(tmp_path, "--context-parallel-size", "2", *OFFLOADED, ranks=2, steps=1)
    comparison = Pair(plan, tmp_path).compared()
    assert comparison.agrees, report(plan, comparison)
