"""What is read of an InternVL's config.json, besides what fields have keys for."""

from typing import Any


def fields(found: Any) -> dict[str, dict[str, Any]]:
    """The side of the blocks that become tokens; config.json has its inverse."""
    return {"image_encoder": {"spatial_merge_size": round(1 / found.downsample_ratio)}}
