"""How large images and videos are made before they are cut, and what transparency becomes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

# What stands behind what is transparent: white, as where models are served, or the colours that the
# file hides there, as in transformers before 5.24.
Transparency = Literal["white", "drop"]
TRANSPARENCIES: tuple[Transparency, ...] = get_args(Transparency)


@dataclass(frozen=True, kw_only=True)
class PixelLimits:
    """The least and the most pixels of an image, and of a video; None: as the folder says.

    A video's are counted as its family's processor does: all frames together (Qwen3-VL), or each
    frame (Qwen2.5-VL).
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Those of a command line's options."""
        return cls(**{each.name: given[each.name] for each in fields(cls)})

    def given(self) -> dict[str, int]:
        """Those that there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def limit(self, transform: Any, prefix: str = "", *, patch: int) -> None:
        """Give a processor of transformers those of images or, with ``video_``, of videos.

        ``patch`` is the pixels that become one visual token. ValueError for limits that leave no
        size, or less than one such token.
        """
        names = tuple(f"{prefix}{side}_pixels" for side in ("min", "max"))
        given, size = self.given(), transform.size
        if given.keys().isdisjoint(names):
            return
        edges = zip(("shortest_edge", "longest_edge"), names, strict=True)
        limits = {edge: given[name] if name in given else size[edge] for edge, name in edges}
        lower, upper = limits.values()
        if lower < 1 or upper < max(lower, patch):
            least, most = (f"--{name.replace('_', '-')}" for name in names)
            raise ValueError(
                f"{least} is {lower} and {most} {upper} (where one is not"
                " given, as the model's folder says): expected 1 or more, the second not below"
                f" the first, and not below {patch}, which is one visual token."
            )
        transform.size = limits


FOLDERS_LIMITS = PixelLimits()
