"""Conversion there and back: every bit, every dtype, every file beside the weights."""

import json
import os
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import MODEL, PP2, TP2, convert_on
from micro.convert_worker import _PeakMemory
from micro.random_folder import write_random_folder
from ranks import RankError, run_ranks
from safetensors.torch import load_file, save_file
from small_checkpoints import write_checkpoint
from tensor_files import assert_same_weights
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.checkpoint.settings_notes import CARRIED_FOLDER
from loongplug.cli import app
from loongplug.convert.mapped_weights import MappingReader
from loongplug.convert.rank import _iteration_folder, convert
from loongplug.training.run import run
from loongplug.verify.tiny_processor import write_processor

CARRIED = ("tokenizer.model", "LICENSE", "README.md", "additional_chat_templates/a.jinja")
LEFT = ("modeling.py", "original/old.PTH", "model.bin.index.json", ".git/config", "a/b.pickle")
VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A published folder, with values in its configs that no code here would write."""
    folder = tmp_path_factory.mktemp("published") / "hf"
    write_random_folder(folder, model_name="qwen3_vl_tiny")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["bos_token_id"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    for name in (*CARRIED, *LEFT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def parameters_read(rank: int, *, flags: list[str]) -> int:
    """How many boxes of parameters a conversion has read into memory."""
    counted: list[int] = []
    read = FileSystemReader.read_data

    def counting(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        if isinstance(self, MappingReader):  # not one of what is no tensor
            counted.append(len(plan.items))
        return read(self, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", counting)
        convert(flags)
    return sum(counted)


def through_a_checkpoint(
    folder: Path, where: Path, *, there: tuple[str, ...], ranks: int, back: tuple[str, ...]
) -> Path:
    """``folder`` into a checkpoint by one layout, and out of it by another on two ranks.

    What it holds goes from its mapped files into the folder, and not into memory.
    """
    checkpoint, result = str(where / "checkpoint"), where / "result"
    convert_on(ranks, *MODEL, *there, "--load-hf", str(folder), "--save", checkpoint)
    out = ("--load", checkpoint, "--save-hf", str(result))
    assert convert_on(2, *MODEL, *back, *out, by=parameters_read) == [0, 0]
    return result


def assert_same_file(result: Path, folder: Path, name: str = "model.safetensors") -> None:
    assert (result / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize(
    ("there", "ranks", "back"),
    [((*TP2, *PP2), 4, ()), (VPP2, 4, VPP2)],
    ids=["tp2pp2-to-dp2", "vpp2dp2-to-vpp2"],
)
def test_there_and_back_gives_the_same_bytes(folder, tmp_path, there, ranks, back):
    result = through_a_checkpoint(folder, tmp_path, there=there, ranks=ranks, back=back)
    assert_same_file(result, folder)
    assert '"bos_token_id": 7' in (folder / "config.json").read_text()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert_same_file(result, folder, name)
    for name in CARRIED:
        assert (result / name).read_text() == name
    assert not [name for name in LEFT if (result / name).exists()]


@pytest.mark.parametrize(
    ("name", "processor"),
    [
        ("llava_tiny", partial(write_processor, kind="llava")),
        ("qwen2_audio_tiny", partial(write_processor, kind="qwen2_audio")),
        ("qwen2_5_omni_tiny", partial(write_processor, kind="qwen2_5_omni")),
    ],
)
def test_a_folder_alone_goes_there_and_back(tmp_path, name, processor):
    """Whichever encoders its model has: config.json says so, and the checkpoint's own note."""
    folder, checkpoint = tmp_path / "hf", tmp_path / "checkpoint"
    write_random_folder(folder, model_name=name, processor=processor)
    there = ("--device", "cpu", "--load-hf", str(folder), "--save", str(checkpoint))
    convert_on(4, *there, *TP2, *PP2)
    result = tmp_path / "result"
    convert_on(2, "--device", "cpu", "--load", str(checkpoint), "--save-hf", str(result))
    assert_same_weights(folder, result)
    # Files of a processor, too.
    assert {each.name for each in folder.iterdir()} <= {each.name for each in result.iterdir()}


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory) -> Path:
    """``folder`` as a checkpoint that two ranks wrote."""
    checkpoint = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert_on(2, *MODEL, *TP2, "--load-hf", str(folder), "--save", str(checkpoint))
    return checkpoint


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def overwrite(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"__1_0\.distcp ends after \d+ of \d+ bytes: copy it again"),
        (
            overwrite,
            r"release/__1_0\.distcp cannot be read \(some of it is not a .+\): copy or save the",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_on_all_ranks(checkpoint, tmp_path, damage, message):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    damage(damaged / "release" / "__1_0.distcp")
    with pytest.raises(RankError, match=message) as raised:
        convert_on(2, *MODEL, *PP2, "--load", str(damaged), "--save-hf", str(tmp_path / "out"))
    assert len(raised.value.errors) == 2
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_that_is_converted_is_chosen_by_step(tmp_path):
    for name in ("iter_0000002", "iter_0000004"):
        write_checkpoint(tmp_path, name)
    (tmp_path / TRACKER).write_text("4")
    assert _iteration_folder(Namespace(load=str(tmp_path), ckpt_step=None)).name == "iter_0000004"
    assert _iteration_folder(Namespace(load=str(tmp_path), ckpt_step=2)).name == "iter_0000002"
    with pytest.raises(ValueError, match="has no checkpoint; give the folder that --save named"):
        _iteration_folder(Namespace(load=str(tmp_path / "iter_0000002"), ckpt_step=None))


def with_tensors(folder: Path, changed: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with other weights."""
    shutil.copytree(folder, changed, copy_function=os.link)
    (changed / "model.safetensors").unlink()
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    return changed


def test_every_tensor_keeps_its_own_dtype(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = tensor.float() + 1e-4  # no bf16 number
        elif "pos_embed" in name:
            tensors[name] = tensor.half() * 1.001
    mixed = with_tensors(folder, tmp_path / "mixed", tensors)
    result = through_a_checkpoint(mixed, tmp_path, there=TP2, ranks=2, back=PP2)
    after = load_file(result / "model.safetensors")
    assert {str(tensor.dtype) for tensor in after.values()} == {
        "torch.bfloat16",
        "torch.float16",
        "torch.float32",
    }
    assert_same_weights(mixed, result)


def test_dtypes_that_no_checkpoint_can_hold_are_refused(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.self_attn.k_proj.weight"
    odd = with_tensors(folder, tmp_path / "odd", tensors | {name: tensors[name].float()})
    with pytest.raises(RankError, match=r"layers.1.self_attn.k_proj.weight is torch.float32"):
        convert_on(1, *MODEL, "--load-hf", str(odd), "--save", str(tmp_path / "out"))


def test_a_checkpoint_of_another_model_is_refused_without_its_note(folder, checkpoint, tmp_path):
    """Megatron would fill up or cut off a vocabulary of another size without a word."""
    with pytest.raises(RankError, match="has checkpoints that this run does not load"):
        convert_on(1, *MODEL, "--load-hf", str(folder), "--save", str(checkpoint))
    without = tmp_path / "without"
    shutil.copytree(checkpoint, without)
    (without / "loongplug_architecture.json").unlink()
    back = (*MODEL, *TP2, "--load", str(without), "--save-hf", str(tmp_path / "out"))
    for size in ("256", "120"):
        with pytest.raises(RankError, match="word_embeddings"):
            convert_on(2, *back, f"model.foundation.vocab_size={size}")
    assert not (tmp_path / "out").exists()


def test_an_export_in_another_precision_says_so(flags, folder, tmp_path):
    """Carried configs keep all but the dtype."""
    out = tmp_path / "out"
    training = [*flags, "--train-iters", "1", "--tokenizer-model", str(folder)]
    training += ["--load-hf", str(folder), "--save-hf", str(out)]
    run_ranks(losses, 1, flags=training, timeout=120.0)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    assert (before.pop("dtype"), after.pop("dtype")) == ("bfloat16", "float32")
    for config in (before, after):
        for section in ("text_config", "vision_config"):
            config[section].pop("dtype", None)
    assert after == before


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [step.loss for step in run(flags)]


def test_training_starts_from_a_converted_checkpoint(flags, folder, checkpoint, tmp_path):
    training = [*flags, "--train-iters", "2", "--bf16"]
    of_folder = ["--load-hf", str(folder)]
    of_checkpoint = ["--load", str(checkpoint), "--save", str(tmp_path / "run")]
    ((from_folder,), (from_checkpoint,)) = (
        run_ranks(losses, 1, flags=[*training, *source], timeout=120.0)
        for source in (of_folder, of_checkpoint)
    )
    assert len(from_checkpoint) == 2  # a release starts at iteration 0
    assert from_checkpoint == from_folder


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (("--save", "x"), "give one source"),
        (("--load", "a", "--load-hf", "b", "--save", "x"), "give one source"),
        (("--load-hf", "b"), "give a target"),
        (("--load-hf", "b", "--save-hf", "x", "--save-lora", "x/y"), "give each export a folder"),
        (("--load-hf", "b", "--save-hf", "x", "--save", "x/y"), "give each export a folder"),
        (("--load", "a", "--save", "x"), "give --save-hf DIR"),
        (("--load", "a", "--save-hf", "x"), "--load a has no checkpoint"),
    ],
)
def test_ends_that_make_no_conversion_are_refused(ends, message):
    with pytest.raises(ValueError, match=message):
        convert([*MODEL, *ends])


# Some 400 MB in bf16, so that what a conversion needs anyway is small beside it.
LARGER = ("model.foundation.hidden_size=2048", "model.foundation.ffn_hidden_size=8192")


def peak_of(rank: int, *, flags: list[str]) -> tuple[int, float]:
    memory = _PeakMemory()
    memory.start()
    shares = convert(flags)
    return memory.stop(), 1.2 * shares.shard_bytes + shares.largest_tensor_bytes


@pytest.mark.slow
def test_memory_is_the_shard_and_one_tensor(tmp_path):
    source = tmp_path / "hf"
    write_random_folder(source, model_name="qwen3_vl_tiny", overrides=LARGER)
    checkpoint, back = str(tmp_path / "checkpoint"), str(tmp_path / "back")
    fixed = 40 * 2**20  # modules imported on the way, buffers
    for ends in (
        ("--load-hf", str(source), "--save", checkpoint),
        ("--load", checkpoint, "--save-hf", back),
    ):
        flags = [*MODEL, *LARGER, *TP2, *ends]
        for peak, limit in run_ranks(peak_of, 2, flags=flags, timeout=200.0):
            print(peak / 2**20, limit / 2**20)
            assert limit > 4 * fixed  # else the test says nothing
            assert peak < limit + fixed, (ends, peak / 2**20, limit / 2**20)


def test_command_line(folder, tmp_path):
    """The real command, with processes of its own; a failure is an exit code and one sentence."""
    result = CliRunner().invoke(
        app,
        [
            *("convert", *MODEL, "--ranks", "2", *TP2),
            *("--load-hf", str(folder), "--save", str(tmp_path / "checkpoint")),
        ],
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "checkpoint" / CARRIED_FOLDER / "tokenizer.json").is_file()
    failed = CliRunner().invoke(app, ["convert", *MODEL, "--load-hf", str(folder)])
    assert failed.exit_code == 1
    assert "exit code" in failed.output
