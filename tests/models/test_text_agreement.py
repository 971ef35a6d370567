"""The decoders of text against transformers: logits, loss and every gradient, in layouts."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import Layout, trusted
from hf_reference import Reference, as_saved, assert_agrees
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file
from test_peft_agreement import adapted, with_our_gradients
from there_and_back import in_and_out
from tiny_text import DECODERS, PACKAGE, data, described, step_of, with_decoder, write_reference

from loongplug.models.lora import LoraSettings
from loongplug.models.lora.mapping import adapter_table
from loongplug.verify.tiny_processor import write_processor
from loongplug.verify.weights import write_random_adapters

CASES = [
    *((name, Layout()) for name in DECODERS),
    ("llama", Layout(tp=2, sequence_parallel=True)),
    ("llama", Layout(pp=2)),
    ("qwen2", Layout(tp=2, pp=2)),
    ("qwen3-tied", Layout(tp=2, pp=2, sequence_parallel=True)),
    ("qwen3_moe", Layout(tp=2, sequence_parallel=True)),
    ("qwen3_moe", Layout(pp=2, micro_batch_size=2)),
    ("qwen3_moe", Layout(dp=2, ep=2)),
]


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    with trusted(PACKAGE):
        yield


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' step of a decoder, made once."""

    @cache
    def of(name: str) -> Reference:
        model, folder = with_decoder(DECODERS[name]), tmp_path_factory.mktemp(name)
        theirs, written = write_reference(folder, model)
        step = step_of(theirs, data())
        step = replace(step, gradients=as_saved(theirs, folder / "gradients"))
        # Each tensor that transformers wrote has its own gradient, and none is left over.
        assert set(step.gradients) == written
        return Reference(model, folder, data(), step)

    return of


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_layouts_agree_with_transformers(references: Any, name: str, layout: Layout) -> None:
    assert_agrees(references(name), layout)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Layout(tp=2)),
        ("qwen2-tied", Layout()),
        ("mistral", Layout()),
        ("qwen3_moe", Layout(pp=2)),
        ("qwen3_moe", Layout(dp=2, ep=2)),
    ],
    ids=str,
)
def test_every_tensor_comes_back_bit_by_bit(
    references: Any, tmp_path: Path, name: str, layout: Layout
) -> None:
    model, folder = references(name).model, references(name).folder
    target, processor = tmp_path / "again", tmp_path / "processor"
    processor.mkdir()
    write_processor(processor)
    folders = {"source": folder, "target": target, "processor": processor}
    small = {"max_file_bytes": 50_000}
    run_ranks(in_and_out, layout.world_size, model=model, layout=layout, **folders, **small)
    files = sorted(target.glob("*.safetensors"))
    back = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert len(files) > 1
    written = load_file(folder / "model.safetensors")
    assert set(back) == set(written)
    assert [name for name, tensor in written.items() if not torch.equal(back[name], tensor)] == []


def test_adapters_agree_with_peft(tmp_path: Path) -> None:
    settings = {"foundation": LoraSettings(rank=4, alpha=6.0)}
    model = adapted(with_decoder(DECODERS["qwen3_moe"]), settings)
    theirs, _ = write_reference(tmp_path, model)
    table = adapter_table(model, described(model))
    assert table is not None
    adapters = tmp_path / "adapters"
    write_random_adapters(adapters, table, seed=1)
    wrapped = PeftModel.from_pretrained(theirs, adapters, is_trainable=True)
    step = with_our_gradients(step_of(wrapped, data()), table)
    expected = Reference(model, tmp_path, data(), step)
    for layout in (Layout(), Layout(tp=2, sequence_parallel=True), Layout(dp=2, ep=2)):
        assert_agrees(expected, layout, adapters=adapters)
