"""A model is a list of named entries, and nothing but its own description knows their names."""

import ast
import dataclasses
from pathlib import Path

import pytest
from tiny_families import QWEN3_VL

import loongplug
from loongplug.models.architecture import VisionLanguageArchitecture

pytestmark = pytest.mark.quick


def test_only_a_model_s_description_knows_the_names_of_encoder_and_projector() -> None:
    """Elsewhere they stand in text for users and in flags; loops over entries do without them."""
    package = Path(loongplug.__file__).parent
    own = {package / "models" / "architecture.py"}
    for file in package.glob("models/**/*.py"):
        if "LOONGPLUG_FAMILIES = " in file.read_text():
            own |= {*file.parent.glob("*.py")} if file.name == "__init__.py" else {file}
    names = {name for entry in VisionLanguageArchitecture.entries() for name in entry.modules}
    names -= {"text_decoder"}  # what Megatron is asked for as a language model, everywhere
    found = []
    for file in sorted({*package.rglob("*.py")} - own):
        for node in ast.walk(ast.parse(file.read_text())):
            said = {
                getattr(node, "attr", None),
                getattr(node, "arg", None),
                node.value if isinstance(node, ast.Constant) else None,
            }
            if said & names:
                found.append(f"{file.relative_to(package)}:{getattr(node, 'lineno', '?')}")
    assert not found


@pytest.mark.parametrize(
    ("layers", "stages", "given", "expected"),
    [
        (7, 3, None, (3, 2, 2)),
        (4, 4, None, (1, 1, 1, 1)),
        (5, 1, None, (5,)),
        (5, 2, (1, 4), (1, 4)),
    ],
)
def test_layers_of_an_encoder_are_spread_over_stages_as_evenly_as_can_be(
    layers: int, stages: int, given: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    own = {
        "num_layers": layers,
        "deepstack_layers": (),
        "pipeline_model_parallel_size": stages,
        "stage_layers": given,
    }
    assert dataclasses.replace(QWEN3_VL.image_encoder, **own).layers_of_stages == expected
