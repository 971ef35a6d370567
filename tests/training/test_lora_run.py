"""Whole runs with adapters: losses and norms in other layouts, what they write, learning rates."""

from pathlib import Path

import pytest
import torch
from compared_runs import first_weights, same, train
from layout_flags import OVERLAP, PP2, SP, TP2
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from loongplug.models.lora.mapping import adapter_table
from loongplug.training.config import compose_model
from loongplug.training.run import run
from loongplug.verify.replicas import replicas_apart
from loongplug.verify.weights import write_random_adapters

pytestmark = pytest.mark.slow

LORA = (
    *("+model.foundation.lora.rank=4", "+model.foundation.lora.alpha=8"),
    *("+model.image_encoder.lora.rank=2", "+model.image_projector.freeze=True"),
)
RECOMPUTE = (
    *("model.image_encoder.recompute=true", "--recompute-granularity", "full"),
    *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
)
# The model, ranks and flags.
LAYOUTS = {
    "full": ("qwen3_vl_tiny", 4, ("--enable-full-hetero-dp", *TP2, *PP2, SP, *RECOMPUTE, *OVERLAP)),
    "experts": (
        "qwen3_vl_moe_tiny",
        4,
        (*TP2, SP, *OVERLAP, "--expert-model-parallel-size", "2", "--enable-encoder-hetero-dp"),
    ),
}


@pytest.fixture(scope="module")
def started(flags, tmp_path_factory):
    """Folders of a model's weights and adapters, and flags that start from both, made once."""
    made = {}

    def of(model: str) -> tuple[Path, Path, list[str]]:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            given = [*flags, "--model-name", model]
            first_weights(given, folder / "hf")
            composed = compose_model(model_name=model, overrides=LORA)
            hugging_face = composed.family.load_hugging_face(composed.config)
            table = adapter_table(composed.config, hugging_face)
            write_random_adapters(folder / "adapters", table, seed=1)
            given += ["--load-hf", str(folder / "hf"), "--train-iters", "3"]
            made[model] = folder / "hf", folder / "adapters", given
        return made[model]

    return of


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_that_of_one_rank_and_writes_what_peft_makes_of_it(started, tmp_path, name):
    model, ranks, layout = LAYOUTS[name]
    hf, start, given = started(model)
    given = [*given, LORA[-1], "--load-lora", str(start)]  # which says what adapters it has
    alone = train(given, "--save-lora", str(tmp_path / "alone"))
    assert alone[-1][0] < 0.98 * alone[0][0]  # it learns, so a wrong update shows
    out = ("--save-lora", str(tmp_path / "lora"), "--save-hf", str(tmp_path / "merged"))
    found = train(given, *layout, *out, ranks=ranks)
    assert same(found, alone), (found, alone)
    before, after, expected = map(adapters, (start, tmp_path / "lora", tmp_path / "alone"))
    assert after.keys() == before.keys()
    for tensor in after:
        assert not torch.equal(after[tensor], before[tensor]), tensor
        torch.testing.assert_close(after[tensor], expected[tensor], rtol=0, atol=2e-5)

    # Everything else is as it was, to the bit; adapted weights are what peft merges.
    base, merged = weights(hf), weights(tmp_path / "merged")
    changed = {tensor for tensor in base if not torch.equal(base[tensor], merged[tensor])}
    plain = AutoModelForImageTextToText.from_pretrained(hf, dtype=torch.float32)
    PeftModel.from_pretrained(plain, tmp_path / "lora").merge_and_unload().save_pretrained(
        tmp_path / "theirs"
    )
    theirs = weights(tmp_path / "theirs")
    assert changed == {
        tensor for tensor in base if not torch.equal(base[tensor], turned(theirs, base, tensor))
    }
    for tensor in changed:
        torch.testing.assert_close(
            merged[tensor], turned(theirs, base, tensor), rtol=1e-5, atol=1e-6
        )


def turned(tensors, like, name):
    """transformers writes experts the other way round than the published files have them."""
    tensor = tensors[name]
    return tensor if tensor.shape == like[name].shape else tensor.transpose(-1, -2)


def test_fresh_adapters_change_nothing_and_start_alike_in_every_layout(started, tmp_path):
    given = [*started("qwen3_vl_tiny")[2], *LORA, "--train-iters", "1"]
    frozen = "+model.image_projector.freeze=True"
    plain = train([*started("qwen3_vl_tiny")[2], "--train-iters", "1"], frozen)
    found = train(given, "--lr", "0", "--save-lora", str(tmp_path / "one"))
    more = ("--lr", "0", "--save-lora", str(tmp_path / "two"))
    again = train(given, *TP2, *PP2, SP, *more, ranks=4)
    assert found[0][0] == pytest.approx(plain[0][0], rel=1e-6)
    assert same(again, found)
    first, second = adapters(tmp_path / "one"), adapters(tmp_path / "two")
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert bool(tensor.any()) is ("lora_A" in name)
    other = train(given, *more, "--seed", "4321")
    assert other
    assert not torch.equal(
        adapters(tmp_path / "two")[name.replace("_B", "_A")], first[name.replace("_B", "_A")]
    )


def test_patterns_freeze_adapters(started, tmp_path):
    """The encoder's whole, of the decoder's A alone; the encoder's own freeze changes nothing."""
    _, start, given = started("qwen3_vl_tiny")
    given = [*given, *LORA, "--load-lora", str(start), "--train-iters", "1", *TP2, SP, *OVERLAP]
    given += ["--freeze-parameters", "image_encoder.*_lora.*", "*_lora.a"]
    out = ("--save-lora", str(tmp_path / "lora"), "+model.image_encoder.freeze=True")
    train(given, *out, ranks=2)
    before, after = adapters(start), adapters(tmp_path / "lora")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "language_model" in name and "lora_B" in name}


class Copies:
    """Looks at the copies of adapters once a run is over."""

    def built(self, chunks, optimizer, *, mapping):
        self.chunks, self.mapping = chunks, mapping

    def loss(self, microbatch, report):
        pass


def copies_apart(rank, *, flags):
    watch = Copies()
    run(flags, watch=watch)
    moved = [p for n, p in watch.chunks[0].named_parameters() if n.endswith("_lora.b") and p.any()]
    apart = replicas_apart(watch.chunks, watch.mapping, lambda each: each.data, what="weights")
    return len(moved), apart


def test_dropout_leaves_copies_alike(started):
    """The encoder has no sequence parallelism: its ranks have to drop the same."""
    flags = [*started("qwen3_vl_tiny")[2], *LORA, *TP2, SP, *RECOMPUTE]
    flags += [f"+model.{name}.lora.dropout=0.5" for name in ("foundation", "image_encoder")]
    for moved, apart in run_ranks(copies_apart, 2, flags=flags, timeout=120.0):
        assert moved
        assert not apart


MULTIPLES = {"image_encoder": 0.5, "image_projector": 0.25, "foundation": 2.0}


def test_a_module_moves_by_its_multiple_of_the_learning_rate(started, tmp_path):
    """Adam's first step is the rate times the gradient's sign, whatever the gradient's size."""
    hf, _, given = started("qwen3_vl_tiny")
    given = [*given, "--train-iters", "1", "--weight-decay", "0", "--adam-eps", "1e-12"]
    multiples = [f"+model.{name}.lr_mult={mult}" for name, mult in MULTIPLES.items()]
    train(given, "--save-hf", str(tmp_path / "plain"))
    layout = ("--enable-full-hetero-dp", *PP2, "--use-distributed-optimizer")
    train(given, *layout, *multiples, "--save-hf", str(tmp_path / "multiplied"), ranks=2)
    start, plain, multiplied = map(weights, (hf, tmp_path / "plain", tmp_path / "multiplied"))
    seen = set()
    for name, tensor in start.items():
        module = (
            "foundation" if "visual" not in name
            else "image_projector" if "merger" in name
            else "image_encoder"
        )  # fmt: skip
        step, moved = plain[name] - tensor, multiplied[name] - tensor
        sure = step.abs() > 0.9e-3  # where the gradient is more than rounding
        if sure.any():
            seen.add(module)
            expected = MULTIPLES[module] * step[sure]
            close = torch.isclose(moved[sure], expected, rtol=1e-2, atol=1e-6)
            assert close.float().mean() > 0.99, name
    assert seen == MULTIPLES.keys()
