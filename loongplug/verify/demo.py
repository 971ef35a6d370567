"""Demo data for a model's small likeness, with the media that the model takes."""

from pathlib import Path

from loongplug.data.demo import make_demo_data
from loongplug.data.demo_audio_processor import write_audio_processor, write_omni_processor
from loongplug.data.demo_processor import write_processor
from loongplug.data.demo_sounds import make_sound_data
from loongplug.models.architecture import MultimodalArchitecture
from loongplug.models.entries import encoders
from loongplug.verify.tiny import tiny_images


def demo_rows(model: MultimodalArchitecture, folder: Path, *, samples: int) -> Path:
    """The file with so many rows that ``model`` trains on; made in ``folder`` if it is not there.

    Raises:
        ValueError: a package that the demo's data come from is not installed.
    """
    sees, hears = _senses(model)
    kind = ("_both" if sees else "_audio") if hears else ""
    rows = folder / f"train{kind}.jsonl"
    if not rows.is_file():
        (make_sound_data if hears else make_demo_data)(folder, train=samples, test=1)
    return rows


def write_demo_processor(model: MultimodalArchitecture, folder: Path) -> None:
    """Write tokenizer, chat template and the processors of a likeness of ``model``."""
    sees, hears = _senses(model)
    if hears:
        (write_omni_processor if sees else write_audio_processor)(folder)
    else:
        write_processor(folder, video_style=model.video_style(), fixed=tiny_images(model))


def _senses(model: MultimodalArchitecture) -> tuple[bool, bool]:
    """Whether the model takes images, and whether it takes sounds."""
    media = {kind for entry in encoders(model.entries()) for kind in entry.media}
    return "image" in media, "audio" in media
