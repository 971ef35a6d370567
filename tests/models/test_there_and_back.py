"""Weights from a Hugging Face folder into every layout, and back to the same bits.

Those of the text decoders and of experts are in the tests of their own.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hf_models import Layout, reference_model
from there_and_back import assert_there_and_back
from tiny_families import OMNI, QWEN2_5_VL, QWEN2_AUDIO, QWEN3_VL, tied

from loongplug.verify.tiny_processor import write_processor

MODELS: dict[str, Any] = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl-tied": tied(QWEN3_VL),
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_audio": QWEN2_AUDIO,
    "qwen2_5_omni": OMNI,
}
TP2_PP2_VPP2 = Layout(tp=2, pp=2, vpp=2)
CASES = [
    *((name, TP2_PP2_VPP2) for name in MODELS),
    *(
        (f"qwen3_vl{end}", layout)
        for end in ("", "-tied")
        for layout in (Layout(), Layout(pp=4), Layout(pp=2, dp=2))
    ),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model as transformers writes it, and a processor, by the model's name."""

    @cache
    def of(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        reference_model(MODELS[name]).save_pretrained(folder / "hf")
        write_processor(folder / "processor", name.removesuffix("-tied"))
        return folder / "hf", folder / "processor"

    return of


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_there_and_back_to_the_same_bits(
    written: Any, tmp_path: Path, name: str, layout: Layout
) -> None:
    source, processor = written(name)
    assert_there_and_back(
        MODELS[name], source, tmp_path / "out", layout=layout, processor=processor
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing left beside it
