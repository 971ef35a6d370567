"""What is wrong with a folder is said completely, and on every rank."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import Layout
from ranks import model_parallel, run_ranks
from safetensors.torch import load_file, save_file
from tiny_qwen3_vl import chunks_of, hugging_face, save_random_hf_model, tiny_config

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.checkpoint.parameter_holders import held_parameters
from loongplug.checkpoint.safetensors_folder import INDEX_FILE, open_tensors

GATE = "model.language_model.layers.1.mlp.gate_proj.weight"
ALONE, TP2_PP2 = Layout(), Layout(tp=2, pp=2)
NORM = "model.language_model.norm.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_random_hf_model(tmp_path / "hf", tied=False)


@pytest.fixture
def tied_folder(tmp_path) -> Path:
    return save_random_hf_model(tmp_path / "tied", tied=True)


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def load(rank, *, folder, layout=ALONE, tied=False):
    """The error's text, and whether the parameters are still what they were."""
    with model_parallel(tp=layout.tp, pp=layout.pp):
        chunks = chunks_of(layout, tied=tied)
        before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        with pytest.raises(ValueError, match=r".") as caught:
            load_hf_weights(chunks, folder, model=hugging_face(tiny_config(tied=tied)))
        after = [p for chunk in chunks for p in chunk.parameters()]
        untouched = all(torch.equal(b, a) for b, a in zip(before, after, strict=True))
        return str(caught.value), untouched


def load_alone(folder: Path, *, tied: bool = False) -> str:
    ((message, untouched),) = run_ranks(load, 1, folder=folder, tied=tied)
    assert untouched
    return message


def test_all_differences_are_named_at_once_on_every_rank(folder):
    def change(tensors):
        del tensors[NORM]
        tensors[GATE] = tensors[GATE][:-4].contiguous()
        tensors["model.visual.extra"] = torch.zeros(2, 3)

    change_tensors(folder, change)
    results = run_ranks(load, 4, folder=folder, layout=TP2_PP2)
    assert len(set(results)) == 1
    message, untouched = results[0]
    assert untouched
    assert str(folder) in message
    assert f"missing {NORM} (64,)" in message
    assert "extra model.visual.extra (2, 3)" in message
    assert f"{GATE} has shape (76, 64), expected (80, 64)" in message


def test_a_reading_rank_that_fails_still_takes_part_in_broadcasts(folder):
    """Rank 1 has the norm by a broadcast, and more parameters behind it."""
    first = "model.language_model.layers.0.input_layernorm.weight"
    change_tensors(folder, lambda tensors: tensors[first][3:4].fill_(torch.nan))
    results = run_ranks(load, 2, folder=folder, layout=Layout(tp=2), timeout=60.0)
    assert len({message for message, _ in results}) == 1
    assert results[0][0].startswith(f"rank 0: {first} in {folder}")


def load_well(rank, *, folder, tied=False):
    with model_parallel():
        model = hugging_face(tiny_config(tied=tied))
        load_hf_weights(chunks_of(ALONE, tied=tied), folder, model=model)


def test_a_folder_without_config_is_judged_by_its_tensors(folder):
    (folder / "config.json").unlink()
    run_ranks(load_well, 1, folder=folder)


DEEP = "[" * 100_000


def test_a_tied_file_for_an_untied_model_and_the_reverse(folder, tied_folder):
    message = load_alone(tied_folder)
    assert "missing lm_head.weight (136, 64)" in message
    assert "tie_word_embeddings True, expected False" in message
    message = load_alone(folder, tied=True)
    assert "tie_word_embeddings False, expected True" in message


def test_a_tied_file_may_have_the_output_layer_twice(tied_folder):
    embedding = "model.language_model.embed_tokens.weight"
    change_tensors(tied_folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    run_ranks(load_well, 1, folder=tied_folder, tied=True)
    change_tensors(tied_folder, lambda t: t["lm_head.weight"][5, 5].add_(1))
    ((message, _),) = run_ranks(load, 1, folder=tied_folder, tied=True)
    assert "lm_head.weight" in message
    assert "differs" in message


def test_quantized_tensors_are_refused(folder):
    change_tensors(folder, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}))
    assert f"{NORM} has type F8_E4M3" in load_alone(folder)


@pytest.mark.quick
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_as_they_are_read(tmp_path, value):
    save_file({"a": torch.tensor([[1.0, value], [1.0, 2.0]])}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        assert tensors.read("a", (slice(1, 2),)).tolist() == [[1.0, 2.0]]
        said = rf"^a in {tmp_path}/model.safetensors has values that are NaN or infinite"
        with pytest.raises(ValueError, match=said):
            tensors.read("a", (slice(0, 1),))


def test_pickles_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has neither model.safetensors nor" in load_alone(folder)


def test_a_damaged_file_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"not a header")
    assert f"{folder / 'model.safetensors'} cannot be read" in load_alone(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {NORM: "../model.safetensors"}}, "points outside its folder"),
        ({"weight_map": {NORM: "model-00001-of-00002.safetensors"}}, "which is not in"),
        ({"weights": {}}, "is not an index"),
        ([], "is not an index"),
        (DEEP, "is not an index"),
    ],
    ids=["outside", "absent", "no map", "a list", "deep"],
)
def test_a_bad_index_is_named(folder, index, message):
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    assert message in load_alone(folder)


@pytest.mark.quick
def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path):
    """A second copy of it in another file is an error, whichever comes last."""
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    places = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    refused = pytest.raises(ValueError, match=r"two.safetensors has a tensor a, which .* one.safe")
    with refused, open_tensors(tmp_path):
        pass
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    with open_tensors(tmp_path) as tensors:
        assert tensors.read("a", (slice(0, 2),)).tolist() == [0.0, 0.0]


def test_names_of_other_versions_are_read_and_never_beside_the_present_ones(folder):
    formerly = (("model.language_model.", "language_model.model."), ("model.", "whole."))
    with open_tensors(folder) as present, open_tensors(folder, formerly=formerly) as renamed:
        assert "model.visual.pos_embed.weight" in present.shapes()
        assert "whole.visual.pos_embed.weight" in renamed.shapes()
        other = "language_model.model.norm.weight"
        assert torch.equal(renamed.read(other, ()), present.read(NORM, ()))

    change_tensors(folder, lambda tensors: tensors.update({other: tensors[NORM].clone()}))
    with pytest.raises(ValueError, match=rf"has {other} twice, once by the name"):
        open_tensors(folder, formerly=formerly).__enter__()


@pytest.mark.quick
def test_parameters_without_a_row_are_named() -> None:
    chunk = torch.nn.ModuleDict({"text_decoder": torch.nn.Linear(2, 3)})
    with pytest.raises(ValueError, match=r"no row for text_decoder.weight \(3, 2\)"):
        held_parameters([chunk], hugging_face(tiny_config(tied=False)).mapping)
