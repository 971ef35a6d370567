"""Hugging Face folders that we write: as transformers takes them, whole or not at all."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf_models import Layout
from ranks import model_parallel, run_ranks
from tensor_files import assert_same_weights
from there_and_back import in_and_out
from tiny_qwen3_vl import chunks_of, hugging_face, save_random_hf_model, tiny_config
from transformers import AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from loongplug.checkpoint import hf_export
from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.checkpoint.export_folder import EXPORT_LIST
from loongplug.checkpoint.hf_export import (
    carried_files,
    check_hf_export,
    copy_carried_files,
    save_hf_folder,
)
from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.verify.tiny_processor import write_processor


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    write_processor(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_the_export(tied, processor_folder, tmp_path):
    source = save_random_hf_model(tmp_path / "hf", tied=tied)
    target = tmp_path / "out"
    run = partial(run_ranks, in_and_out, model=tiny_config(tied=tied), processor=processor_folder)
    layout = Layout(tp=2, pp=2)
    run(4, layout=layout, source=source, target=target, max_file_bytes=40_000)
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"

    model, report = AutoModelForImageTextToText.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == tied
    reference = Qwen3VLForConditionalGeneration.from_pretrained(source)
    inputs = picture_inputs()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, reference(**inputs).logits)
    assert model.generation_config.eos_token_id == 2  # <|im_end|>
    assert model.generation_config.pad_token_id == 0
    ours, theirs = model.config.to_dict(), reference.config.to_dict()
    assert {**ours, "_name_or_path": ""} == {**theirs, "_name_or_path": ""}
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json"):
        assert (target / name).read_bytes() == (processor_folder / name).read_bytes()

    again = tmp_path / "again"  # a folder with an index is read as well
    run(1, layout=Layout(), source=target, target=again)
    assert_same_weights(source, again)


def picture_inputs() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[10, 3, 5, 5, 4, 11, 12]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 5).int(),
        "pixel_values": torch.randn(8, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 2, 4]]),
    }


def export_twice(rank, *, source, target, processor):
    """A good export, then one whose writing fails after all was gathered."""
    config = tiny_config(tied=False)
    with model_parallel(tp=2):
        chunks = chunks_of(Layout(tp=2))
        load_hf_weights(chunks, source, model=hugging_face(config))
        save_hf_folder(chunks, target, model=hugging_face(config), processor_folder=processor)
        first = (target / "model.safetensors").stat().st_ino

        def full_disk(*args):
            raise OSError(28, "No space left on device")

        write, hf_export.new_tensor_file = hf_export.new_tensor_file, full_disk
        with pytest.raises(ValueError, match="No space left") as caught:
            save_hf_folder(chunks, target, model=hugging_face(config), processor_folder=processor)
        kept = (target / "model.safetensors").stat().st_ino == first
        hf_export.new_tensor_file = write
        save_hf_folder(chunks, target, model=hugging_face(config), processor_folder=processor)
        replaced = (target / "model.safetensors").stat().st_ino != first
        return str(caught.value), kept, replaced


def test_a_failed_export_leaves_the_older_one_and_fails_everywhere(tmp_path, processor_folder):
    source = save_random_hf_model(tmp_path / "hf", tied=False)
    target = tmp_path / "deeper" / "out"
    results = run_ranks(export_twice, 2, source=source, target=target, processor=processor_folder)
    assert [result[1:] for result in results] == [(True, True)] * 2
    assert results[0][0] == results[1][0]
    assert results[0][0].startswith("rank 0: ")
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_an_export_that_cannot_work_is_refused_at_the_start(tmp_path, processor_folder):
    config = tiny_config(tied=False)
    check = partial(check_hf_export, model=hugging_face(config), processor_folder=processor_folder)
    check(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty")
    foreign = save_random_hf_model(tmp_path / "foreign", tied=False)
    with pytest.raises(ValueError, match="not wholly an earlier export"):
        check(foreign)
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        check_hf_export(tmp_path / "new", model=hugging_face(config), processor_folder=foreign)


def test_what_stands_beside_the_weights_and_is_no_code_is_carried(tmp_path):
    hub = tmp_path / "hub"
    own, outside = hub / "snapshots" / "abc", tmp_path / "outside"
    for path in (
        *(own / "LICENSE", own / "a" / "b.md", own / ".cache" / "c.json", own / "d.SafeTensors"),
        *(own / "e.py", own / "f.safetensors.index.json", own / "adapter_config.json"),
        *(own / "out" / EXPORT_LIST, own / "out" / "g.md", own / "run" / TRACKER),
        *(own / "run" / "deeper" / "h.md", own / "loongplug_data.json", outside / "secret"),
        *(hub / "blobs" / "12ab", outside / "tokenizer.json", own / "tokenizer.model"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    os.mkfifo(own / "pipe")
    (own / "card.md").symlink_to("../../blobs/12ab")
    (own / "inside").symlink_to("a/b.md")
    (own / "secret").symlink_to(outside / "secret")
    (own / "folder").symlink_to(outside)
    (own / "gone").symlink_to("nowhere")
    (own / "tokenizer.json").symlink_to(outside / "tokenizer.json")  # of a usual name
    found = carried_files(own)
    expected = {"LICENSE", "a/b.md", "card.md", "inside", "tokenizer.json", "tokenizer.model"}
    assert found == {name: own / name for name in expected}

    # Beside another folder's tokenizer, what that folder lacks and what is not in its place.
    given = tmp_path / "given"
    given.mkdir()
    for name in ("tokenizer.json", "LICENSE"):
        (given / name).write_text("given")
    (own / "chat_template.jinja").write_text("{}")
    ours = {name: given / name for name in ("tokenizer.json", "LICENSE")}
    theirs = {name: own / name for name in expected - ours.keys()}
    assert carried_files(given, own) == {**theirs, **ours}
    copy_carried_files(tmp_path / "target", given, own)
    assert (tmp_path / "target" / "card.md").read_text() == "12ab"
    assert not (tmp_path / "target" / "card.md").is_symlink()


@pytest.mark.quick
def test_an_error_of_what_is_collected_waits_for_no_other_rank(tmp_path, monkeypatch):
    """The others may wait for a message of this rank: the board of failures ends them."""

    def collect(*_, **__):
        raise RuntimeError("out of memory")
        yield

    def entered(target):
        raise AssertionError("a collective")

    monkeypatch.setattr(hf_export, "together", entered)
    tensors = SimpleNamespace(bundles=(), collect=collect)
    with pytest.raises(RuntimeError, match="out of memory"):
        hf_export.write_files(tmp_path, (), tensors, target=tmp_path, names=None, rank_of=None)
