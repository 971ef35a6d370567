"""The tokenizer and the image processor of a model, from one folder in Hugging Face format."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from loongplug.data.pixel_limits import FOLDERS_LIMITS, PixelLimits
from loongplug.data.special_text import SpecialTexts

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, kw_only=True)
class VisionTokens:
    """The texts of the tokens that mark images and videos or hold their places; Qwen's here."""

    image: str = "<|image_pad|>"
    video: str = "<|video_pad|>"
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"


QWEN_TOKENS = VisionTokens()


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What turns a conversation into tokens and patches, with the ids that both sides share.

    The image processor is always the Pillow one, so that a machine with torchvision makes
    the same pixels as one without.
    """

    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil
    folder: Path
    tokens: VisionTokens
    special_texts: SpecialTexts | None  # what is text in a row's text; None: none of it
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    end_token: str
    end_token_id: int
    pad_token_id: int
    vocab_size: int  # one more than the highest id; a model may pad beyond it
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    pixel_limits: PixelLimits
    patch_dim: int  # channels * temporal * patch * patch: the width of a row of pixels

    @property
    def vision_token_ids(self) -> frozenset[int]:
        """Ids that only mark or hold the place of images and videos."""
        marks = (self.vision_start_token_id, self.vision_end_token_id)
        return frozenset((self.image_token_id, self.video_token_id, *marks))


def load_processor(
    folder: str | Path,
    *,
    tokens: VisionTokens = QWEN_TOKENS,
    special_tokens_in_text: bool = False,
    pixel_limits: PixelLimits = FOLDERS_LIMITS,
) -> Processor:
    """Load tokenizer, chat template and image processor from ``folder``, without any network.

    ``tokens`` are those of the model's family. With ``special_tokens_in_text``, special tokens that
    are written in a row's text are special tokens; else they are text. ``pixel_limits`` stand
    above the folder's.

    Raises ValueError when the folder or one of its files is missing or damaged, when the tokenizer
    has no vision tokens, no chat template or no end token, when pixels would be scaled to what is
    not finite, and when the limits leave no size.
    """
    folder = Path(folder)
    _require_files(folder)
    tokenizer = _loaded(AutoTokenizer, folder, names=TOKENIZER_FILES, trust_remote_code=False)
    image_processor = _loaded(Qwen2VLImageProcessorPil, folder, names=IMAGE_PROCESSOR_FILES)
    if problem := scaling_problem(image_processor):
        raise ValueError(f"The image processor in {folder} has {problem}.")
    texts = (tokens.image, tokens.video, tokens.start, tokens.end)
    ids = _special_ids(tokenizer, texts, folder=folder)
    patch, temporal = image_processor.patch_size, image_processor.temporal_patch_size
    pixel_limits.limit_images(image_processor, patch=(patch * image_processor.merge_size) ** 2)
    return Processor(
        tokenizer=tokenizer,
        image_processor=image_processor,
        folder=folder,
        tokens=tokens,
        special_texts=None if special_tokens_in_text else SpecialTexts.of(tokenizer, more=texts),
        image_token_id=ids[tokens.image],
        video_token_id=ids[tokens.video],
        vision_start_token_id=ids[tokens.start],
        vision_end_token_id=ids[tokens.end],
        end_token=tokenizer.eos_token,
        end_token_id=tokenizer.eos_token_id,
        pad_token_id=(
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        patch_size=patch,
        temporal_patch_size=temporal,
        spatial_merge_size=image_processor.merge_size,
        pixel_limits=pixel_limits,
        patch_dim=len(image_processor.image_mean) * temporal * patch * patch,
    )


def scaling_problem(transform: Any) -> str | None:
    """Why an image or video processor cannot make pixels finite numbers, if so."""
    for name in ("image_mean", "image_std"):
        values = getattr(transform, name)
        numbers = isinstance(values, Sequence) and all(_is_number(value) for value in values)
        if not numbers or len(values) != 3 or (name == "image_std" and min(values) <= 0):
            above = " above 0" if name == "image_std" else ""
            return (
                f"{name} {values!r:.80}: expected three finite numbers{above}, for red, green and "
                "blue. Copy the file from the model that it belongs to"
            )
    factor = transform.rescale_factor
    if not _is_number(factor) or factor <= 0:
        return (
            f"rescale_factor {factor!r:.80}: expected a finite number above 0, such as 1 / 255. "
            "Copy the file from the model that it belongs to"
        )
    return None


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _loaded(kind: Any, folder: Path, *, names: Sequence[str], **options: Any) -> Any:
    """What transformers makes of the files; whatever it raises, the folder is to blame."""
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{' or '.join(names)} in {folder}, or what stands beside it, cannot be read "
            f"({type(error).__name__}: {reason:.300}). Copy the files from the model that they "
            "belong to."
        ) from error


def require_fit(processor: Processor, *, vocab_size: int, **expected: int) -> None:
    """Refuse a processor that was made for another model.

    ``expected`` are the model's token ids, patch sizes and merge size, by the processor's names.
    """
    wrong = [
        f"{name} is {getattr(processor, name)} in the folder but {value} in the model"
        for name, value in expected.items()
        if getattr(processor, name) != value
    ]
    if processor.vocab_size > vocab_size:
        wrong.append(
            f"the tokenizer has {processor.vocab_size} ids but the model's vocab_size is"
            f" {vocab_size}"
        )
    if wrong:
        raise ValueError(
            f"{processor.folder} does not fit the model: {'; '.join(wrong)}. Name the folder that"
            " belongs to this model, or correct these values in the model's YAML."
        )


def _require_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"No tokenizer folder at {folder}: looked for a folder with"
            f" {' or '.join(TOKENIZER_FILES)} and {' or '.join(IMAGE_PROCESSOR_FILES)}. Give the"
            " path of a downloaded Hugging Face model or of a folder made by"
            " scripts/make_demo_data.py."
        )
    for kind, names in (
        ("tokenizer", TOKENIZER_FILES),
        ("image processor", IMAGE_PROCESSOR_FILES),
    ):
        if not any((folder / name).is_file() for name in names):
            raise ValueError(
                f"No {kind} in {folder}: looked for {' or '.join(names)}. Copy the file from the"
                " model that this folder belongs to."
            )


def _special_ids(tokenizer: Any, texts: Sequence[str], *, folder: Path) -> dict[str, int]:
    vocab = tokenizer.get_vocab()
    missing = [text for text in texts if text not in vocab]
    if missing:
        raise ValueError(
            f"The tokenizer in {folder} has no {', '.join(missing)}: the tokenizer of the model's"
            " family was expected. Use the tokenizer of the vision model, not of its text model."
        )
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer in {folder} has no chat template: put chat_template.jinja into the"
            " folder."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer in {folder} names no eos_token, the token that ends an answer: set it"
            " in tokenizer_config.json."
        )
    return {text: vocab[text] for text in texts}
