"""A model of the widths of Qwen3-VL-8B on 8 ranks reads each byte of its folder once."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf_models import Layout, build_chunks, decoder_config
from ranks import model_parallel, run_ranks

from loongplug.checkpoint import hf_import
from loongplug.checkpoint.safetensors_folder import (
    PlannedTensor,
    new_tensor_file,
    plan_files,
    write_index,
)
from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.hf_config import hf_config
from loongplug.models.registry import family_of
from loongplug.training.config import compose_model


def write_empty_folder(folder: Path, model: VisionLanguageArchitecture) -> int:
    """A folder of the model's real size whose tensors are holes, which take no room on the disk."""
    described = family_of(model).load_hugging_face(model)
    hf_config(described).save_pretrained(folder)
    bundles = [
        [PlannedTensor(source.name, source.shape, torch.bfloat16) for source in bundle.sources]
        for bundle in described.mapping.bundles()
    ]
    files = plan_files(bundles, max_bytes=5 * 2**30)
    for file in files:
        with new_tensor_file(folder, file):
            pass
        path = folder / file.name
        data = sum(tensor.nbytes for tensor in file.tensors)
        os.truncate(path, path.stat().st_size + data)
    write_index(folder, files)
    return sum(tensor.nbytes for bundle in bundles for tensor in bundle)


def bytes_read(rank: int, *, folder: Path, model: VisionLanguageArchitecture, layout: Layout):
    """What this rank reads for a model whose parameters have shapes only."""
    described = family_of(model).load_hugging_face(model)
    with (
        model_parallel(tp=layout.tp, pp=layout.pp),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(hf_import.dist, "broadcast", lambda *args, **kwargs: None)
        device = SimpleNamespace(device=torch.device("meta"), synchronize=lambda: None)
        patch.setattr(hf_import, "current_platform", lambda: device)
        config = decoder_config(model, layout)
        config.perform_initialization = False
        with torch.device("meta"):
            chunks = build_chunks(model, config, layout)
        return hf_import.load_hf_weights(chunks, folder, model=described)


@pytest.mark.slow
def test_an_8b_on_8_ranks_reads_each_byte_once(tmp_path):
    layout = Layout(tp=2, pp=2, dp=2)
    # Its widths and its encoder; of the 36 decoder layers, which are all alike, 8.
    layers = "model.foundation.num_layers=8"
    model = compose_model(model_name="qwen3_vl_8b", overrides=[layers]).config
    total = write_empty_folder(tmp_path, model)
    assert total > 6e9
    read = run_ranks(bytes_read, 8, folder=tmp_path, model=model, layout=layout, timeout=200.0)
    assert sum(read) == total
    shares = [count / total for count in read if count]
    # The second replica reads nothing; those that read share the work nearly evenly.
    assert len(shares) == layout.tp * layout.pp
    assert max(shares) < 1.3 / len(shares)
