"""The tokenizer and the processors of a model's media, from one folder in Hugging Face format."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    LlavaImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
    WhisperFeatureExtractor,
)

from loongplug.data.audio_frames import AudioFrames
from loongplug.data.data_options import FOLDERS_LIMITS, PixelLimits, Transparency
from loongplug.data.folder_files import (
    COMBINED_FILE,
    IMAGE_FILE,
    MODEL_FILE,
    QWEN_VISION_TOKENS,
    read_json,
    separate_template,
)
from loongplug.data.media_sizes import AudioSizes, PatchSizes
from loongplug.data.processor import (
    FixedPatches,
    ImagePatches,
    MultiTurn,
    Processor,
    QwenPatches,
    SpecialTexts,
)
from loongplug.data.sample import told

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
IMAGE_PROCESSOR_FILES = (IMAGE_FILE, COMBINED_FILE)
_CLASS = "processor_class"

_LEAST, _LARGEST = sys.float_info.min, sys.float_info.max  # of numbers above 0

_HEARING = "WhisperFeatureExtractor"
_FIXED: Mapping[str, Any] = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
    "LlavaImageProcessor": LlavaImageProcessorPil,
    "GotOcr2ImageProcessor": GotOcr2ImageProcessorPil,  # InternVL's
}


def load_processor(
    folder: str | Path,
    *,
    tokens: Mapping[str, str] | None = None,
    patch_sizes: PatchSizes | None = None,
    audio_sizes: AudioSizes | None = None,
    special_tokens_in_text: bool = False,
    multi_turn: MultiTurn = "last",
    train_template_thought: bool = False,
    pixel_limits: PixelLimits = FOLDERS_LIMITS,
    transparency: Transparency = "white",
) -> Processor:
    """Load tokenizer, chat template and processors from ``folder``, without any network.

    ``tokens`` and ``audio_sizes`` are the model's, and ``patch_sizes``, if the folder has none;
    without them, all is as the folder says. ValueError for what is missing, damaged, not known or
    does not fit, and for ``pixel_limits`` that leave no size.
    """
    folder = Path(folder)
    _require_files(folder)
    read = AutoTokenizer.from_pretrained
    tokenizer = _loaded(read, folder, names=TOKENIZER_FILES, trust_remote_code=False)
    if (file := separate_template(folder)) is not None:
        tokenizer.chat_template = read_json(file).get("chat_template")
    images = _load_images(folder, patch_sizes) if _has_images(folder) else None
    if images is not None:
        limited(images, pixel_limits)
    elif tokens is not None and "image_token_id" in tokens:
        raise ValueError(
            f"No image processor in {folder}, which is for sounds: name the folder that belongs to"
            " this model."
        )
    hears = _hearing_kind(folder) == _HEARING if tokens is None else "audio_token_id" in tokens
    audio = _load_audio(folder, audio_sizes) if hears else None
    if tokens is None:
        tokens = _folders_tokens(folder, tokenizer, images, audio)
    tokens = {**tokens, **_around_images(tokenizer, images)}
    texts = list(tokens.values())
    return Processor(
        tokenizer=tokenizer,
        images=images,
        folder=folder,
        tokens=tokens,
        token_ids=_special_ids(tokenizer, tokens, folder=folder),
        special_texts=None if special_tokens_in_text else SpecialTexts.of(tokenizer, more=texts),
        multi_turn=multi_turn,
        trains_thoughts=train_template_thought,
        end_token=tokenizer.eos_token,
        end_token_id=tokenizer.eos_token_id,
        pad_token_id=(
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        pixel_limits=pixel_limits,
        transparency=transparency,
        audio=audio,
    )


def _hearing_kind(folder: Path) -> Any:
    """What the folder calls its feature extractor, as transformers finds it; None without."""
    combined = _combined(folder)
    found = combined.get("feature_extractor", combined.get("audio_processor"))
    settings = found if isinstance(found, Mapping) else read_json(folder / IMAGE_FILE)
    return settings.get("feature_extractor_type")


def _has_images(folder: Path) -> bool:
    """Whether there is an image processor; one of the oldest folders does not say its kind."""
    own = read_json(folder / IMAGE_FILE)
    named = "image_processor" in _combined(folder) or "image_processor_type" in own
    return named or _hearing_kind(folder) != _HEARING


def _load_audio(folder: Path, given: AudioSizes | None) -> AudioFrames | None:
    """The folder's feature extractor, if any, for a model of the ``given`` or its own sizes."""
    kind = _hearing_kind(folder)
    if kind is None:
        return None
    if kind != _HEARING:
        raise ValueError(
            f"The feature extractor in {folder} is a {kind!r:.80}, where a WhisperFeatureExtractor"
            " was expected: copy the file from the model that the folder belongs to."
        )
    read = WhisperFeatureExtractor.from_pretrained
    extractor = _loaded(read, folder, names=IMAGE_PROCESSOR_FILES)
    with told(f"{folder / MODEL_FILE} cannot be used: ", "."):
        sizes = given or AudioSizes.of_config(read_json(folder / MODEL_FILE))
    if sizes is None:
        raise ValueError(
            f"{folder} does not say how many tokens a sound has: put the model's {MODEL_FILE}"
            " there."
        )
    with told(f"The feature extractor in {folder} cannot be used: ", "."):
        return AudioFrames(extractor, sizes)


def _load_images(folder: Path, given: PatchSizes | None) -> ImagePatches:
    """The folder's image processor; ``given`` sizes count where the folder has none."""
    read = Qwen2VLImageProcessorPil.get_image_processor_dict  # whatever the kind
    config, _ = _loaded(read, folder, names=IMAGE_PROCESSOR_FILES)
    with told(f"The image processor in {folder} has ", "."):
        kind = processor_kind(config.get("image_processor_type"))
    transform = _loaded(kind.from_pretrained, folder, names=IMAGE_PROCESSOR_FILES)
    with told(f"The image processor in {folder} has ", "."):
        require_scaling(transform)
    if kind is Qwen2VLImageProcessorPil:
        return QwenPatches(transform)
    if kind is GotOcr2ImageProcessorPil and _combined(folder)[_CLASS] == "InternVLProcessor":
        transform.crop_to_patches = True  # which that class asks for, whatever the file says
    said = [sizes for sizes in (_folders_patches(folder), given) if sizes is not None]
    if not said:
        raise ValueError(
            f"{folder} does not say how large patches are, neither does its image processor:"
            f" put the model's {MODEL_FILE} there."
        )
    size = next((sizes.image_size for sizes in reversed(said) if sizes.image_size), None)
    with told(f"The image processor in {folder} cannot be used: ", "."):
        # The folder's own sizes of patches: whether they are the model's is asked with all else.
        return FixedPatches(transform, replace(said[0], image_size=size))


def _combined(folder: Path) -> Mapping[str, Any]:
    """What the folder says of the whole: of tokenizer, template and image processor."""
    own = read_json(folder / IMAGE_FILE)
    return {_CLASS: own.get(_CLASS), **read_json(folder / COMBINED_FILE)}


def _folders_patches(folder: Path) -> PatchSizes | None:
    """By config.json, else by what LLaVA's processor is told; None where neither says."""
    combined = _combined(folder)
    more = combined.get("num_additional_image_tokens")
    strategy = combined.get("vision_feature_select_strategy")
    if more is not None and strategy is not None and more != (strategy == "default"):
        raise ValueError(
            f"{folder / COMBINED_FILE} has num_additional_image_tokens {more} and"
            f" vision_feature_select_strategy {strategy!r:.40}, so that images have another number"
            " of tokens than patches: expected 1 with 'default', or 0 with 'full'."
        )
    config = read_json(folder / MODEL_FILE)
    with told(f"{folder / MODEL_FILE} cannot be used: ", "."):
        by_processor = {"vision_config": {"patch_size": combined.get("patch_size")}}
        return PatchSizes.of_config(config) or PatchSizes.of_config(by_processor)


def _around_images(tokenizer: Any, images: ImagePatches | None) -> dict[str, str]:
    """What InternVL's processor writes around an image's token, which stands alone in templates."""
    if images is None or not isinstance(images.transform, GotOcr2ImageProcessorPil):
        return {}
    found = {side: getattr(tokenizer, f"{side}_image_token", None) for side in ("start", "end")}
    return {f"image_{side}_token_id": text for side, text in found.items() if text}


def _folders_tokens(
    folder: Path, tokenizer: Any, images: ImagePatches | None, audio: AudioFrames | None
) -> Mapping[str, str]:
    """Those of the family that the folder is for, as its tokenizer and processor name them."""
    if audio is not None:
        return {
            field: getattr(tokenizer, name, None) or usual
            for field, (name, usual) in _NAMES.items()
            if images is not None or field.startswith("audio")
        }
    assert images is not None
    if isinstance(images, QwenPatches):
        return QWEN_VISION_TOKENS
    said = [
        getattr(tokenizer, "context_image_token", None),  # InternVL's
        getattr(tokenizer, "image_token", None),
        _combined(folder).get("image_token"),
    ]
    image = next((text for text in said if isinstance(text, str)), "<image>")
    return {"image_token_id": image}


# How tokenizers of families with sounds name these tokens, and what they are where one does not.
_NAMES = {
    "image_token_id": ("image_token", "<|IMAGE|>"),
    "video_token_id": ("video_token", "<|VIDEO|>"),
    "vision_start_token_id": ("vision_bos_token", "<|vision_bos|>"),
    "vision_end_token_id": ("vision_eos_token", "<|vision_eos|>"),
    "audio_token_id": ("audio_token", "<|AUDIO|>"),
    "audio_start_token_id": ("audio_bos_token", "<|audio_bos|>"),
    "audio_end_token_id": ("audio_eos_token", "<|audio_eos|>"),
}


def require_scaling(transform: Any) -> None:
    """ValueError for an image or video processor that cannot make pixels finite numbers."""
    colours = "three finite numbers{}, for red, green and blue"
    for name, count, least, expected in (
        ("image_mean", 3, -_LARGEST, colours.format("")),
        ("image_std", 3, _LEAST, colours.format(" above 0")),
        ("rescale_factor", 1, _LEAST, "a finite number above 0, such as 1 / 255"),
    ):
        value = getattr(transform, name)
        values = [value] if count == 1 else value if isinstance(value, Sequence) else []
        numbers = (type(each) in (int, float) and least <= each <= _LARGEST for each in values)
        if len(values) != count or not all(numbers):
            raise ValueError(
                f"{name} {value!r:.80}: expected {expected}. Copy the file from the model that it"
                " belongs to"
            )


def _loaded(read: Any, folder: Path, *, names: Sequence[str], **options: Any) -> Any:
    """What transformers makes of the files; whatever it raises, the folder is to blame."""
    try:
        return read(str(folder), local_files_only=True, **options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{' or '.join(names)} in {folder}, or what stands beside it, cannot be read "
            f"({type(error).__name__}: {reason:.300}). Copy the files from the model that they "
            "belong to."
        ) from error


def _require_files(folder: Path) -> None:
    for kind, names in (
        ("tokenizer", TOKENIZER_FILES),
        ("image processor", IMAGE_PROCESSOR_FILES),
    ):
        if not any((folder / name).is_file() for name in names):
            raise ValueError(
                f"No {kind} in {folder}: looked for {' or '.join(names)}. Give the path of a"
                " downloaded Hugging Face model, or copy the file from it."
            )


def _special_ids(tokenizer: Any, tokens: Mapping[str, str], *, folder: Path) -> dict[str, int]:
    vocab = tokenizer.get_vocab()
    missing = [text for text in tokens.values() if text not in vocab]
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
    return {name: vocab[text] for name, text in tokens.items()}


def processor_kind(name: Any) -> Any:
    """The class for an ``image_processor_type``, always Pillow's; Qwen's where there is none."""
    plain = str(name or "Qwen").removesuffix("Fast").removesuffix("Pil")
    if plain.startswith("Qwen"):
        return Qwen2VLImageProcessorPil
    if plain not in _FIXED:
        raise ValueError(
            f"image_processor_type {name!r:.80}, where one of Qwen2VLImageProcessor,"
            f" {', '.join(_FIXED)} was expected: models with other processors cannot be trained"
        )
    return _FIXED[plain]


def limited(patches: ImagePatches, limits: PixelLimits) -> None:
    """Give the processor these limits; ValueError where they leave no size, or it has one alone."""
    if isinstance(patches, FixedPatches):
        if (limits.min_pixels, limits.max_pixels) != (None, None):
            height, width = patches.size
            raise ValueError(
                "--min-pixels and --max-pixels are for models whose images keep their own sizes,"
                f" but this model's image processor makes all {height} x {width} pixels: leave"
                " them out."
            )
        return
    token = patches.patch_size * patches.spatial_merge_size
    limits.limit(patches.transform, patch=token**2)
