"""The tensors of an encoder that ``transformers`` computes, and its part of config.json."""

from typing import Any

from loongplug.models.hf_mapping import CARRIED, Row, Source
from loongplug.models.hf_model import HuggingFacePart
from loongplug.models.hugging_face_encoder.config import (
    HuggingFaceEncoderConfig,
    setting_names,
)


def encoder(vision: HuggingFaceEncoderConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The encoder: each tensor of the files is a parameter, as it is.

    Carried parameters keep their places in the tower. So their first name, which is the one that
    counts, is that of carried ones everywhere, and the second says where they are.
    """
    tower = vision.tower
    rows = []
    for name, shape in tower.shapes.items():
        places: tuple[str, ...] = (f"{ours}.tower.{name}",)
        if name in tower.carried:
            places = (f"{ours}.{CARRIED}.{name}", *places)
        source = Source(f"{theirs}.{tower.in_files[name]}", shape)
        rows.append(Row(places, (source,), folded=False))
    return HuggingFacePart(rows=rows, values=_values(vision.in_transformers))


def settings_of(section: Any) -> dict[str, Any]:
    """A section of config.json: its kind, and what it says otherwise than the kind's defaults.

    Raises:
        ValueError: it asks for code of the model's folder.
    """
    if getattr(section, "auto_map", None):
        raise ValueError(
            f"config.json has auto_map in the section of {section.model_type}: code that comes "
            "with a model's folder is never run; give a model that transformers has itself"
        )
    defaults = _values(type(section)())
    settings = {
        name: value
        for name, value in _values(section).items()
        if name != "model_type" and value != defaults[name]
    }
    return {"model_type": section.model_type, "settings": settings}


def _values(section: Any) -> dict[str, Any]:
    """What the kind itself has in config.json."""
    known = setting_names(type(section))
    values = {name: value for name, value in section.to_dict().items() if name in known}
    return {"model_type": section.model_type, **values}
