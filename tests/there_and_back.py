"""A Hugging Face folder into a family's model, in any layout, and out of it again."""

import json
from pathlib import Path
from typing import Any

import hf_models
from hf_models import Layout, build_chunks, decoder_config
from ranks import model_parallel, run_ranks
from tensor_files import assert_same_weights
from transformers import AutoModelForMultimodalLM

from loongplug.checkpoint.hf_export import save_hf_folder
from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.models.architecture import VisionLanguageArchitecture


def in_and_out(
    rank: int,
    *,
    model: VisionLanguageArchitecture,
    layout: Layout,
    source: Path,
    target: Path,
    processor: Path,
    **options: Any,
) -> int:
    """Import a folder and export what the model has of it; how many bytes this rank has read."""
    hugging_face = hf_models.family_of(model).load_hugging_face(model)
    with model_parallel(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep, etp=layout.etp):
        chunks = build_chunks(model, decoder_config(model, layout), layout)
        read = load_hf_weights(chunks, source, model=hugging_face)
        save_hf_folder(chunks, target, model=hugging_face, processor_folder=processor, **options)
    return read


def assert_there_and_back(
    model: VisionLanguageArchitecture,
    source: Path,
    target: Path,
    *,
    layout: Layout,
    processor: Path,
    original: Path | None = None,
) -> int:
    """The folder's bits and config.json come back, or the ``original``'s; transformers loads it.

    Returns how many bytes all ranks have read.
    """
    folders = {"source": source, "target": target, "processor": processor}
    read: list[int] = run_ranks(
        in_and_out, layout.world_size, model=model, layout=layout, **folders
    )
    original = original or source
    assert_same_weights(original, target)
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (target, original)
    )
    assert ours == theirs
    loaded, report = AutoModelForMultimodalLM.from_pretrained(target, output_loading_info=True)
    architecture = hf_models.family_of(model).load_hugging_face(model).in_transformers.architecture
    assert type(loaded).__name__ == architecture
    assert not any(report.values()), report
    return sum(read)
