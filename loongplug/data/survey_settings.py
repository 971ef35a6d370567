"""Settings of a survey: what decides, beside rows and media, what rows become."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from loongplug.data.data_options import ANY_ROW, FOLDERS_LIMITS, PixelLimits, RowAccess
from loongplug.data.processor import MultiTurn, Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.tokens import TrainingPhase
from loongplug.data.video import video_style_of


@dataclass(frozen=True, kw_only=True)
class SurveySettings:
    """What decides, beside rows and media, what rows become."""

    folder: Path  # of tokenizer, template and processors
    training_phase: TrainingPhase
    timestamps: bool  # how the model's family tells the time in videos
    video_fps: float | None = None
    special_tokens_in_text: bool = False
    multi_turn: MultiTurn = "split"
    train_template_thought: bool = False
    pixel_limits: PixelLimits = FOLDERS_LIMITS
    access: RowAccess = ANY_ROW
    index_dir: Path | None = None  # where indexes lie; without, beside their data

    @classmethod
    def of(cls, given: Mapping[str, Any], **others: Any) -> Self:
        """Those of a command line's options; ``timestamps`` as the folder's, unless given."""
        names = {each.name for each in fields(cls)} & given.keys()
        folder = Path(given["tokenizer_model"])
        found = {
            **{name: given[name] for name in names},
            "folder": folder,
            "access": RowAccess.of(given),
            "pixel_limits": PixelLimits.of(given),
            **others,
        }
        if "timestamps" not in found:
            found["timestamps"] = video_style_of(folder).timestamps
        return cls(**found)

    @property
    def options(self) -> dict[str, Any]:
        """Those that a command line gives, but for places; ``data index`` has all of them."""
        own = ("training_phase", "video_fps", "special_tokens_in_text", "multi_turn")
        rows = ("max_row_mib", "confine_media", "ignore_keys", "columns")
        return {
            **{name: getattr(self, name) for name in (*own, "train_template_thought")},
            **{name: getattr(self.access, name) for name in rows},
            **self.pixel_limits.given(),
        }

    def processor(self) -> Processor:
        """The folder's, for a model whose tokens are the folder's."""
        return load_processor(
            self.folder,
            special_tokens_in_text=self.special_tokens_in_text,
            multi_turn=self.multi_turn,
            train_template_thought=self.train_template_thought,
            pixel_limits=self.pixel_limits,
        )
