"""Hugging Face folders that we write: as transformers takes them, whole or not at all."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from gathered import replica_differences
from hf_models import Layout
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from ranks import model_parallel, run_ranks
from safetensors.torch import load_file
from tensor_files import assert_same_weights
from there_and_back import in_and_out
from tiny_qwen3_vl import (
    chunks_of,
    hugging_face,
    save_random_hf_model,
    tiny_config,
)
from transformers import AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from loongplug.checkpoint import hf_export
from loongplug.checkpoint.hf_export import (
    carried_files,
    check_hf_export,
    copy_carried_files,
    save_hf_folder,
)
from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    digest_of,
    read_manifest,
    write_manifest,
)
from loongplug.checkpoint.tracker import TRACKER
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


def wrapped_and_bf16(rank, *, source, target, processor):
    config = tiny_config(tied=False)
    with model_parallel(tp=2, pp=2):
        half = {"params_dtype": torch.bfloat16, "bf16": True}
        (chunk,) = chunks_of(Layout(tp=2, pp=2), **half)
        wrapped = DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(),
            module=Float16Module(chunk.config, chunk),
        )
        load_hf_weights([wrapped], source, model=hugging_face(config))
        save_hf_folder([wrapped], target, model=hugging_face(config), processor_folder=processor)


def test_wrapped_models_keep_their_precision(tmp_path, processor_folder):
    source = save_random_hf_model(tmp_path / "hf", tied=False)
    target = tmp_path / "out"
    run_ranks(wrapped_and_bf16, 4, source=source, target=target, processor=processor_folder)
    before = load_file(source / "model.safetensors")
    for name, tensor in load_file(target / "model.safetensors").items():
        assert torch.equal(tensor, before[name].bfloat16()), name
    model = AutoModelForImageTextToText.from_pretrained(target)
    assert model.dtype is torch.bfloat16


def drifted_replicas(rank, *, source):
    config = tiny_config(tied=False)
    with model_parallel(tp=2):
        (chunk,) = chunks_of(Layout(tp=2))
        load_hf_weights([chunk], source, model=hugging_face(config))
        before = replica_differences([chunk], hugging_face(config).mapping, what="weight")
        if rank == 1:
            with torch.no_grad():
                chunk.text_decoder.decoder.layers[2].self_attention.q_layernorm.weight[3] -= 0.5
        after = replica_differences([chunk], hugging_face(config).mapping, what="weight")
        return before, after


def test_replicas_that_drifted_apart_are_seen(tmp_path):
    source = save_random_hf_model(tmp_path, tied=False)
    name = "text_decoder.decoder.layers.2.self_attention.q_layernorm.weight"
    for before, after in run_ranks(drifted_replicas, 2, source=source):
        assert set(before.values()) == {0.0}
        assert after.pop(name) == pytest.approx(0.5)
        assert set(after.values()) == {0.0}
        assert "image_encoder.patch_embed.bias" in after
        assert "text_decoder.decoder.layers.2.mlp.linear_fc1.weight" not in after


def export_twice(rank, *, source, target, processor):
    """A good export, then one whose writing fails after all was gathered."""
    config = tiny_config(tied=False)
    with model_parallel(tp=2):
        chunks = chunks_of(Layout(tp=2))
        load_hf_weights(chunks, source, model=hugging_face(config))
        save_hf_folder(chunks, target, model=hugging_face(config), processor_folder=processor)
        first = (target / "model.safetensors").stat().st_ino
        (target / "README.md").touch()  # of the user

        def full_disk(*args):
            raise OSError(28, "No space left on device")

        add, hf_export.TensorFileWriter.add = hf_export.TensorFileWriter.add, full_disk
        with pytest.raises(ValueError, match="No space left") as caught:
            save_hf_folder(chunks, target, model=hugging_face(config), processor_folder=processor)
        (source / "README.md").touch()
        with pytest.raises(ValueError, match=r"README\.md"):  # before anything is written
            save_hf_folder(
                chunks,
                target,
                model=hugging_face(config),
                processor_folder=processor,
                weights_folder=source,
            )
        kept = (target / "model.safetensors").stat().st_ino == first
        hf_export.TensorFileWriter.add = add
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
    manifest = read_manifest(target)
    assert manifest is not None
    assert "model.safetensors" in manifest.files
    digests = {name: digest_of(target / name) for name in manifest.files}
    assert digests == {name: file.sha256 for name, file in manifest.files.items()}
    found = {path.name for path in target.iterdir()}
    assert found == {*manifest.files, MANIFEST_FILE, "README.md"}


def test_an_export_that_cannot_work_is_refused_at_the_start(tmp_path, processor_folder):
    config = tiny_config(tied=False)
    check = partial(check_hf_export, model=hugging_face(config), processor_folder=processor_folder)
    check(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty")
    foreign = save_random_hf_model(tmp_path / "foreign", tied=False)
    older = tmp_path / "older"
    older.mkdir()
    write_manifest(older, Manifest("model", {}))
    for folder in (older, foreign):
        (folder / "LICENSE").touch()
    check(older)
    with pytest.raises(ValueError, match="LICENSE"):
        check(older, weights_folder=foreign)
    with pytest.raises(ValueError, match="not an earlier export"):
        check(foreign)
    with pytest.raises(ValueError, match="is a file"):
        check(foreign / "config.json")
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        check_hf_export(tmp_path / "new", model=hugging_face(config), processor_folder=foreign)


def test_what_stands_beside_the_weights_and_is_no_code_is_carried(tmp_path):
    hub = tmp_path / "hub"
    own, outside = hub / "snapshots" / "abc", tmp_path / "outside"
    for path in (
        *(own / "LICENSE", own / "a" / "b.md", own / ".cache" / "c.json", own / "d.SafeTensors"),
        *(own / "e.py", own / "f.safetensors.index.json", own / "adapter_config.json"),
        *(own / "out" / MANIFEST_FILE, own / "out" / "g.md", own / "run" / TRACKER),
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
