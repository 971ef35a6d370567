"""A model is a list of named entries, and nothing but its own description knows their names."""

import ast
import dataclasses
from pathlib import Path

import pytest
from tiny_families import QWEN3_VL

import loongplug
from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.entries import Entry, Role, checked, encoders
from loongplug.training.config import available_models, compose_model

pytestmark = pytest.mark.quick

ENCODER = Entry(name="ears", role=Role.ENCODER, beside=("bridge",), into="text")
DECODER = Entry(name="text", role=Role.DECODER)


def test_entries_come_in_their_order() -> None:
    found = checked([ENCODER, DECODER])
    assert found == (ENCODER, DECODER)
    assert ENCODER.modules == ("ears", "bridge")
    assert encoders(found) == (ENCODER,)


def test_two_modules_of_one_name() -> None:
    twice = Entry(name="eyes", role=Role.ENCODER, beside=("bridge",), into="text")
    with pytest.raises(ValueError, match="two modules of the model are called 'bridge': rename"):
        checked([ENCODER, twice, DECODER])


def test_an_edge_to_an_entry_that_does_not_exist() -> None:
    lost = Entry(name="ears", role=Role.ENCODER, into="txt")
    with pytest.raises(
        ValueError, match=r"'txt', which is not an entry .*: expected one of ears, text"
    ):
        checked([lost, DECODER])


def test_a_model_has_one_decoder() -> None:
    with pytest.raises(ValueError, match="a model has one decoder, and this one has none"):
        checked([Entry(name="ears", role=Role.ENCODER)])
    two = [DECODER, Entry(name="more", role=Role.DECODER)]
    with pytest.raises(ValueError, match="a model has one decoder, and this one has text, more"):
        checked(two)


@pytest.mark.not_quick
@pytest.mark.parametrize("name", available_models())
def test_every_model_describes_the_modules_of_its_entries(name: str) -> None:
    model = compose_model(model_name=name).config
    names = [name for entry in model.entries() for name in entry.modules]
    assert list(model.modules()) == names == list(model.keys)
    found = encoders(model.entries())
    assert [entry.name for entry in found] == list(model.encoders)
    assert [model.modules()[entry.name] for entry in found] == [
        model.encoder(name) for name in model.encoders
    ]
    assert {id(each) for each in model.modules().values()} == {
        id(getattr(model, key)) for key in model.keys.values()
    }


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
