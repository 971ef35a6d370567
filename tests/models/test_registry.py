"""The registry of model families and of the parts they join."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from lone_parts import part_of
from towers import TOWERS

from loongplug.models.parts import load
from loongplug.models.qwen3_vl import Qwen3VisionConfig, Qwen3VLConfig
from loongplug.models.registry import families, family_of, trusted_object
from loongplug.training.config import compose_model

pytestmark = pytest.mark.quick

OUTSIDE = """
from dataclasses import dataclass, replace
from loongplug.models.parts import DecoderPart, Part
from loongplug.models.qwen2_5_vl import Qwen25VisionConfig
from loongplug.models.qwen3_vl import LOONGPLUG_FAMILIES as QWEN3
from loongplug.models.qwen3_vl import Qwen3VLConfig

@dataclass(frozen=True, kw_only=True)
class Config(Qwen3VLConfig):
    image_encoder: Qwen25VisionConfig

LOONGPLUG_PARTS = (
    DecoderPart(name="{name}_text", config_class=Qwen3VLConfig.__annotations__["foundation"],
                build="{module}:build", hugging_face="{module}:names", fixed={{}}),
)
LOONGPLUG_FAMILIES = (
    replace(QWEN3[0], name={name!r}, config_class=Config,
            parts={{"image_encoder": "qwen2_5_vit", "image_projector": "qwen3_merger",
                   "text_decoder": "{name}_text"}}),
)

def build(text): return text * 2
"""


def outside_package(folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str) -> str:
    """A package beside loongplug that brings one decoder, and a family with parts of two others."""
    module = f"outside_{name}"
    (folder / f"{module}.py").write_text(OUTSIDE.format(name=name, module=module))
    monkeypatch.syspath_prepend(str(folder))
    return module


def changed(monkeypatch: pytest.MonkeyPatch, module: str, **family: Any) -> list[str]:
    """The package with another family; what to trust."""
    package = sys.modules[module]
    (before,) = package.LOONGPLUG_FAMILIES
    monkeypatch.setattr(package, "LOONGPLUG_FAMILIES", (dataclasses.replace(before, **family),))
    return [module]


def test_names_in_the_registry_lead_somewhere() -> None:
    for family in families().values():
        assert family_of(family.config_class) == family
        assert set(family.special_tokens) <= set(family.config_class.__dataclass_fields__)
        assert list(family.joined) == list(family.config_class.keys)
        for part in (part for parts in family.joined.values() for part in parts):
            assert callable(load(part.build))
            assert callable(load(part.hugging_face))


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
    family = families([module])["guest"]
    assert load(family.joined["text_decoder"][0].build)(4) == 8
    assert family.joined["image_encoder"] == families()["qwen2_5_vl"].joined["image_encoder"]
    assert family.joined["image_projector"] == families()["qwen3_vl"].joined["image_projector"]
    assert family_of(sys.modules[module].Config, trusted_packages=[module]).name == "guest"


def test_a_builder_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = outside_package(tmp_path, monkeypatch, name="odd")
    family = families([module])["odd"]
    monkeypatch.delattr(sys.modules[module], "build")
    with pytest.raises(ValueError, match=r"outside_odd:build, which a part of a model names, can"):
        load(family.joined["text_decoder"][0].build)


def test_part_that_is_not_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = outside_package(tmp_path, monkeypatch, name="lost")
    families([module])
    parts = {**sys.modules[module].LOONGPLUG_FAMILIES[0].parts, "text_decoder": "qwen9"}
    with pytest.raises(
        ValueError,
        match=r"^the model family lost has the part 'qwen9' as its text_decoder, which is not "
        r"registered: expected one of .*, lost_text, .*, qwen2_5, .*LOONGPLUG_PARTS$",
    ):
        families(changed(monkeypatch, module, parts=parts))


def test_a_part_of_another_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = outside_package(tmp_path, monkeypatch, name="odd")
    families([module])
    parts = {**sys.modules[module].LOONGPLUG_FAMILIES[0].parts, "image_encoder": "qwen3_vit"}
    with pytest.raises(ValueError, match=r"odd has .* made from a Qwen3VisionConfig, but its Con"):
        families(changed(monkeypatch, module, parts=parts))


def test_two_modules_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = outside_package(tmp_path, monkeypatch, name="twice")
    families([module])
    eyes, decoder = sys.modules[module].Config.entries()
    second = dataclasses.replace(eyes, name="eyes")
    monkeypatch.setattr(sys.modules[module].Config, "entries", lambda: (eyes, second, decoder))
    with pytest.raises(ValueError, match=r"twice has two modules 'image_projector': rename one"):
        families([module])


def test_name_that_is_taken_and_package_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = outside_package(tmp_path, monkeypatch, name="qwen3_vl")
    with pytest.raises(ValueError, match=r"adds a model family qwen3_vl, a name that is taken"):
        families([module])
    parts = sys.modules[module].LOONGPLUG_PARTS
    monkeypatch.setattr(sys.modules[module], "LOONGPLUG_PARTS", parts * 2)
    with pytest.raises(ValueError, match=r"adds a part qwen3_vl_text, a name that is taken; ren"):
        families([module])
    with pytest.raises(ValueError, match=r"names not_there, which cannot be imported"):
        families(["not_there"])


def test_a_family_takes_any_part_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = part_of(TOWERS["clip"].config())
    outside = types.ModuleType("outside_oval")
    outside.LOONGPLUG_PARTS = (dataclasses.replace(clip, name="nameless", model_type=None),)
    monkeypatch.setitem(sys.modules, "outside_oval", outside)
    family = families(["outside_oval"])["llava"]
    taken = {part.name for part in family.joined["image_encoder"]}
    assert {"clip_vit", "siglip_vit"} <= taken
    assert "qwen3_vit" not in taken  # whose images are not of one size
    assert "nameless" not in taken  # no section of config.json names it by a kind
    llava = compose_model(model_name="llava_tiny").config
    for kind in ("clip", "siglip"):
        model = dataclasses.replace(llava, image_encoder=TOWERS[kind].config())
        assert family.parts_of(model)["image_encoder"].name == f"{kind}_vit"
    outside.LOONGPLUG_PARTS = (dataclasses.replace(clip, name="oval"),)
    with pytest.raises(ValueError, match=r"'clip_vit' and 'oval' both have the model_type 'clip_v"):
        families(["outside_oval"])
    qwen3 = compose_model(model_name="qwen3_vl_tiny").config
    with pytest.raises(ValueError, match=r"has a .*Qwen3VisionConfig as its image_encoder, of whi"):
        family.parts_of(dataclasses.replace(llava, image_encoder=qwen3.image_encoder))


def test_former_names_of_config_classes_are_known() -> None:
    former = "loongplug.models.qwen3_vl.config.Qwen3VLConfig"
    assert trusted_object(former, packages=["loongplug"], cure="") is Qwen3VLConfig
