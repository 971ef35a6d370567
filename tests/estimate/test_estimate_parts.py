"""The parts of the estimate that are plain arithmetic, and the command's refusals."""

from argparse import Namespace
from itertools import product

import pytest
import torch
from megatron.core.utils import local_multi_tensor_scale
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.estimate.command import fits_in
from loongplug.estimate.live_bytes import TRANSIENT, Tape
from loongplug.estimate.ranks import State, _Buffer, _trained, _work
from loongplug.hetero.recorded_schedule import Pipeline, shortened, turns
from loongplug.verify.tiny_processor import write_processor

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("stages", "chunks", "group", "microbatches", "overlaps"),
    [
        *product([1], [1], [1], [1, 4, 20, 23], [False, True]),
        *product([2], [1], [2], [1, 4, 20, 23], [False]),
        *product([2], [2], [2], [2, 4, 20], [False, True]),
        *product([2], [3], [4], [4, 20, 22], [False, True]),
    ],
)
def test_a_shorter_step_has_a_turn_like_each_of_a_long_one(
    stages, chunks, group, microbatches, overlaps
):
    """Of the same chunks, a forward as many microbatches before the backward that it goes with."""

    def like(each):
        both = each.forward, each.backward
        apart = None if None in both else each.forward.microbatch - each.backward.microbatch
        return [None if one is None else one.chunk for one in both], apart

    pipeline = Pipeline(stages=stages, stage=0, chunks=chunks, group=group, overlaps=overlaps)
    whole, (short, numbers) = list(turns(pipeline, microbatches)), shortened(pipeline, microbatches)
    assert sum(each.forward is not None for each in short) <= max(6 * group, 8) * chunks
    assert [like(each) for each in whole] == [like(short[number]) for number in numbers]
    assert (numbers[0], numbers[-1]) == (0, len(short) - 1)


def test_the_tape_keeps_the_fullest_moment():
    tape = Tape(region=TRANSIENT)
    tape.add("weights", 10)
    tape.add("activations", 5)
    tape.sample()
    tape.doing = "forward"
    tape.work(1)
    tape.take("activations", 5)
    tape.doing = "later"
    tape.work(5)
    assert tape.when == "forward"
    assert tape.peak == {"weights": 10, "activations": 5, TRANSIENT: 1}
    assert tape.highest == {"weights": 10, "activations": 5}
    tape.turn("activations", more=4, most=7)
    assert (tape.total, tape.most) == (14, 17)
    tape.turn("activations", more=-3, most=2)
    assert (tape.live["activations"], tape.most) == (1, 17)


def test_the_tape_counts_a_storage_once_and_not_what_was_there_before():
    before = torch.empty(100)
    with Tape(region="one") as tape:
        view = before.view(10, 10)
        made = view * 2
        other = made.t()
        with tape.region("two"):
            doubled = other + other
        assert tape.live == {"one": 400, "two": 400}
        del made, doubled
        assert tape.live == {"one": 400, "two": 0}  # a view holds it
        del other
        assert tape.total == 0
        assert tape.most == 800


@pytest.mark.parametrize(
    ("optimizer", "device", "kind"),
    [
        ("adam", "cpu", {}),
        ("sgd", "cuda", {"foreach": True}),  # as torch has it there
        ("sgd", "cpu", {"foreach": False}),
    ],
)
@pytest.mark.parametrize("sizes", [(300, 200, 400, 100), (400, 400, 10), ()])
def test_an_optimizer_makes_what_torch_s_makes(optimizer, device, kind, sizes):
    plain = Namespace(
        optimizer=optimizer,
        target_device=device,
        use_precision_aware_optimizer=False,
        weight_decay=0.1,
    )
    parameters = [torch.ones(size) for size in (*sizes, 1)]
    if optimizer == "adam":
        optimizer = torch.optim.AdamW(parameters)
    else:
        optimizer = torch.optim.SGD(parameters, weight_decay=0.1, momentum=0.9, **kind)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()  # makes its state
    with Tape(region="step") as tape:
        gradients = [each.grad for each in parameters]
        local_multi_tensor_scale(0, None, [gradients, gradients], 0.5)  # to clip them
        optimizer.step()
    assert _work((*sizes, 1), plain) == pytest.approx(tape.most, abs=64)


def test_gradients_in_bf16_are_copied_for_all_optimizers_at_once():
    """But for the optimizer that takes them as they are, and keeps 16 bits of a weight's 32."""
    sgd = Namespace(
        optimizer="sgd",
        target_device="cuda",
        sgd_momentum=0.9,
        use_precision_aware_optimizer=False,
        optimizer_cpu_offload=False,
        weight_decay=0.1,
    )
    aware = Namespace(
        **{**vars(sgd), "optimizer": "adam", "use_precision_aware_optimizer": True},
        **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"), torch.float32),
    )

    def trained(args, *, gradient=torch.bfloat16):
        parts = [
            [
                _Buffer(
                    parameter=torch.bfloat16,
                    gradient=gradient,
                    expert=expert,
                    length=size,
                    stepped=(size,),
                )
            ]
            for expert, size in ((False, 100), (True, 300), (False, 200))
        ]
        return sum((_trained(each, args) for each in parts), State())

    found = trained(sgd)
    assert (found.weights, found.gradients, found.optimizer) == (1200, 1200, 600 * 8)
    assert (found.copies, found.work) == (600 * 4, 300 * 4)
    assert trained(sgd, gradient=torch.float32).copies == 0
    adam = trained(Namespace(**{**vars(sgd), "optimizer": "adam"}))
    assert (adam.optimizer, adam.copies, adam.work) == (600 * 12, 600 * 4, 0)
    found = trained(aware)
    assert (found.optimizer, found.step) == (600 * 10, 0)
    aware.exp_avg_dtype = torch.bfloat16  # made wide for the kernel
    assert (trained(aware).optimizer, trained(aware).step) == (600 * 8, 300 * 4)


def test_a_tenth_of_the_device_stays_free():
    assert fits_in(72 * 10**9, device_memory=80)
    assert not fits_in(72 * 10**9 + 1, device_memory=80)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "--ranks is 0: expected"),
        (["--ranks", "1", "--device-memory", "0"], "--device-memory is 0.0: expected"),
        (["--ranks", "1", "--model-nam", "x"], "there is no flag --model-nam"),
        (
            ["--ranks", "1", "--model-name", "qwen3_vl_tiny"],
            "--tokenizer-model is not given: expected a tokenizer and data, whose rows say how "
            "large microbatches are, or in their place --visual-tokens N",
        ),
    ],
)
def test_wrong_options_are_one_sentence(options, said):
    result = CliRunner().invoke(app, ["estimate", *options])
    assert result.exit_code == 1
    assert said in result.output


@pytest.mark.slow
def test_visual_tokens_stand_in_for_tokenizer_and_data(tmp_path):
    """The same figures as with a tokenizer and data that are named."""
    write_processor(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    flags = "--ranks 2 --visual-tokens 16 --device-memory 80 --model-name qwen3_vl_tiny"
    flags += " --seq-length 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3"
    flags += " --training-phase sft"
    named = f"--tokenizer-model {tmp_path} --train-data-path {tmp_path}/rows.jsonl"
    written = []
    for number, more in enumerate(("", named)):
        figures = tmp_path / f"{number}.json"
        arguments = ["estimate", *f"{flags} {more}".split(), "--json", str(figures)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "of 72 GB; 10% of the device's 80 GB are kept free" in result.output
        written.append(figures.read_text())
    assert written[0] == written[1]
