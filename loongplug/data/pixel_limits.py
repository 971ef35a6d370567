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

    @property
    def of_videos(self) -> bool:
        """Whether there is one of videos."""
        return (self.video_min_pixels, self.video_max_pixels) != (None, None)

    def given(self) -> dict[str, int]:
        """Those that there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def limit_images(self, transform: Any, *, patch: int) -> None:
        """Give an image processor of transformers these limits; ``patch`` as :meth:`_limit`."""
        self._limit(transform, self.min_pixels, self.max_pixels, prefix="--", patch=patch)

    def limit_videos(self, transform: Any, *, patch: int) -> None:
        """Give a video processor of transformers these limits; ``patch`` as :meth:`_limit`."""
        least, most = self.video_min_pixels, self.video_max_pixels
        self._limit(transform, least, most, prefix="--video-", patch=patch)

    @staticmethod
    def _limit(
        transform: Any, least: int | None, most: int | None, *, prefix: str, patch: int
    ) -> None:
        """``patch``: pixels that become a visual token; ValueError for limits that leave none."""
        if least is None and most is None:
            return
        size = transform.size
        lower = size["shortest_edge"] if least is None else least
        upper = size["longest_edge"] if most is None else most
        if lower < 1 or upper < max(lower, patch):
            raise ValueError(
                f"{prefix}min-pixels is {lower} and {prefix}max-pixels {upper} (where one is not"
                " given, as the model's folder says): expected 1 or more, the second not below"
                f" the first, and not below {patch}, which is one visual token."
            )
        transform.size = {"shortest_edge": lower, "longest_edge": upper}


FOLDERS_LIMITS = PixelLimits()
