"""What config.json says of a whole LLaVA or InternVL, besides what fields have keys for."""

from typing import Any

from loongplug.models.architecture import SquareVisionArchitecture, VisionLanguageArchitecture


def whole(model: VisionLanguageArchitecture) -> dict[str, Any]:
    """Whether a first token is dropped, which only a class token is; how many an image has."""
    encoder = model.image_encoder
    assert isinstance(encoder, SquareVisionArchitecture)
    return {
        "vision_feature_select_strategy": "default" if encoder.has_class_token() else "full",
        "image_seq_length": (encoder.side // encoder.spatial_merge_size) ** 2,
    }


def side_of_blocks(found: Any) -> dict[str, dict[str, Any]]:
    """The side of an InternVL's blocks that become tokens; config.json has its inverse."""
    return {"image_encoder": {"spatial_merge_size": round(1 / found.downsample_ratio)}}
