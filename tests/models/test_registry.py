"""The registry of model families."""

import sys
from pathlib import Path

import pytest

from loongplug.models.qwen3_vl.config import Qwen3VisionConfig, Qwen3VLConfig
from loongplug.models.registry import families, family_of, find_family

pytestmark = pytest.mark.quick

OUTSIDE = """
from dataclasses import dataclass
from loongplug.models.registry import Family

@dataclass(frozen=True, kw_only=True)
class Config:
    size: int

LOONGPLUG_FAMILIES = (
    Family(name={name!r}, model_type="x", config_class="{module}:Config", builder="{module}:build",
           arguments="{module}:arguments", hugging_face="{module}:hugging_face",
           special_tokens={{}}),
)

def build(size): return size * 2

def arguments(config): return {{}}
"""


def outside_package(folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str) -> str:
    """A package beside loongplug that brings one family."""
    module = f"outside_{name}"
    (folder / f"{module}.py").write_text(OUTSIDE.format(name=name, module=module))
    monkeypatch.syspath_prepend(str(folder))
    return module


def test_names_in_the_registry_lead_somewhere() -> None:
    for family in families().values():
        assert isinstance(family.load_config_class(), type)
        assert callable(family.load_builder())
        config_class = family.load_config_class()
        assert family_of(config_class) is family
        assert set(family.special_tokens) <= set(config_class.__dataclass_fields__)


def test_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no model family qwen9; known are .*qwen3_vl"):
        find_family("qwen9")


def test_class_of_no_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Qwen3VisionConfig describes no known model family"):
        family_of(Qwen3VisionConfig)


def test_derived_config_belongs_to_its_base_s_family() -> None:
    class Derived(Qwen3VLConfig):
        pass

    assert family_of(Derived).name == "qwen3_vl"


def test_trusted_package_brings_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = outside_package(tmp_path, monkeypatch, name="guest")
    assert "guest" not in families()
    family = find_family("guest", trusted_packages=[module])
    assert family.load_builder()(4) == 8
    config = sys.modules[module].Config(size=1)
    assert family_of(config, trusted_packages=[module]).name == "guest"


def test_what_a_package_gives_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = outside_package(tmp_path, monkeypatch, name="odd")
    families([module])
    package = sys.modules[module]
    monkeypatch.delattr(package, "build")
    with pytest.raises(ValueError, match=r"outside_odd:build, which a model family names, cannot"):
        find_family("odd", trusted_packages=[module]).load_builder()
    monkeypatch.setattr(package, "LOONGPLUG_FAMILIES", package.LOONGPLUG_FAMILIES[0])
    with pytest.raises(ValueError, match=r"LOONGPLUG_FAMILIES is .*, but a tuple of"):
        families([module])


def test_name_that_is_taken_and_package_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = outside_package(tmp_path, monkeypatch, name="qwen3_vl")
    with pytest.raises(ValueError, match=r"adds a model family qwen3_vl, a name that is taken"):
        families([module])
    with pytest.raises(ValueError, match=r"names not_there, which cannot be imported"):
        families(["not_there"])
