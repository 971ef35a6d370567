"""Processors that make all images one size, against those of transformers themselves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llava_folders import (
    CLIP,
    INTERNVL,
    PADDED,
    PATCH_14,
    SIGLIP,
    TILES,
    internvl_tokenizer,
    llama_tokenizer,
    write_folder,
)
from made_media import picture
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    LlavaImageProcessorPil,
    SiglipImageProcessorPil,
)

from loongplug.data.data_options import PixelLimits
from loongplug.data.fingerprint import processor_digest
from loongplug.data.media_kinds import KINDS, Context
from loongplug.data.media_loader import PixelBytes
from loongplug.data.media_sizes import PatchSizes
from loongplug.data.processor import FixedPatches, Processor, QwenPatches
from loongplug.data.processor_folder import load_processor
from loongplug.data.video import TIMESTAMPS, VideoProcessor
from loongplug.models.patch_grids import patch_coordinates

pytestmark = pytest.mark.quick

SIZES = ((100, 60), (60, 100), (336, 336), (31, 800), (700, 500))  # height, width


def llava(folder: Path, images: dict[str, Any], **options: Any) -> Processor:
    write_folder(folder, llama_tokenizer(legacy=True), images, model=PATCH_14)
    return load_processor(folder, **options)


def internvl(folder: Path, images: dict[str, Any] = TILES) -> Processor:
    return load_processor(
        write_folder(
            folder,
            internvl_tokenizer(),
            images,
            model=INTERNVL,
            processor_class="InternVLProcessor",
        )
    )


def fixed(processor: Processor) -> FixedPatches:
    assert isinstance(processor.images, FixedPatches)
    return processor.images


@pytest.mark.parametrize(
    ("config", "kind", "side", "tokens"),
    [
        (CLIP, CLIPImageProcessorPil, 336, 576),
        (SIGLIP, SiglipImageProcessorPil, 384, 729),
        (PADDED, LlavaImageProcessorPil, 336, 576),
    ],
)
def test_rows_put_together_are_the_pixels_of_transformers(tmp_path, config, kind, side, tokens):
    processor = llava(tmp_path, config)
    images = fixed(processor)
    pictures = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]
    theirs = kind.from_pretrained(str(tmp_path))(images=pictures, return_tensors="pt")
    expected = theirs["pixel_values"]
    assert expected.shape == (len(SIZES), 3, side, side)
    made = images.coded(pictures)
    whole = side // 14 * 14
    for number, (coded, grid) in enumerate(made):
        rows = PixelBytes.of_images(images).decoded(coded)
        assert grid == (1, side // 14, side // 14) == images.grid(*SIZES[number])
        assert rows.dtype == torch.float32
        assert rows.shape == (tokens, processor.vision.patch_dim) == (tokens, 588)
        (frame,) = images.frames(rows)
        assert torch.equal(frame[:, :whole, :whole], expected[number, :, :whole, :whole])
        assert not frame[:, whole:].any()
        assert not frame[:, :, whole:].any()
        for row, column in ((0, 0), (3, 17), (side // 14 - 1, 2)):
            patch = expected[number, :, row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
            assert torch.equal(rows[row * (side // 14) + column], patch.flatten())
    inputs = images.model_inputs(
        torch.cat([rows for rows, _ in made]), torch.tensor([grid for _, grid in made])
    )
    assert inputs.keys() == {"pixel_values"}
    assert inputs["pixel_values"].shape == expected.shape


@pytest.mark.parametrize(
    ("height", "width", "tiles"), [(448, 448, 1), (400, 900, 3), (900, 300, 4)]
)
def test_internvl_s_tiles_in_merge_block_order(tmp_path, height, width, tiles):
    processor = internvl(tmp_path)
    images = fixed(processor)
    assert images.spatial_merge_size == 2
    image = picture(height, width)
    ((coded, grid),) = images.coded([image])
    rows = PixelBytes.of_images(images).decoded(coded)
    theirs = GotOcr2ImageProcessorPil.from_pretrained(str(tmp_path))
    expected = theirs(images=[image], crop_to_patches=True, return_tensors="pt")["pixel_values"]
    assert grid == (tiles, 32, 32) == images.grid(height, width)
    assert len(expected) == tiles
    assert torch.equal(images.frames(rows), expected)
    row, column = patch_coordinates(32, 32, merge=2)
    by_tile = rows.view(tiles, 1024, 3, 14, 14)
    for place in (0, 1, 2, 3, 4, 63, 64, 1023):
        top, left = 14 * int(row[place]), 14 * int(column[place])
        patch = expected[-1, :, top : top + 14, left : left + 14]
        assert torch.equal(by_tile[-1, place], patch)


def test_one_tile_where_the_folder_is_not_internvl_s(tmp_path):
    """The class of the whole asks for tiles; without it, the image processor's own word counts."""
    folder = write_folder(
        tmp_path, internvl_tokenizer(), {**TILES, "processor_class": "Other"}, model=INTERNVL
    )
    assert load_processor(folder).images.grid(400, 900) == (1, 32, 32)


def test_the_marks_around_an_image_are_not_trained(tmp_path):
    processor = internvl(tmp_path)
    ids = [processor.tokenizer.convert_tokens_to_ids(t) for t in ("<img>", "</img>")]
    assert set(processor.token_ids.values()) == {*ids, processor.token_ids["image_token_id"]}
    assert processor.places("image", "video") == (processor.token_ids["image_token_id"],)


def test_where_patch_sizes_come_from(tmp_path):
    tokenizer = llama_tokenizer(legacy=True)
    bare = write_folder(tmp_path / "bare", tokenizer, CLIP)
    with pytest.raises(ValueError, match=r"does not say how large patches are, .*config\.json"):
        load_processor(bare)
    assert load_processor(bare, patch_sizes=PatchSizes(patch_size=28)).vision.patch_size == 28
    told = write_folder(tmp_path / "told", tokenizer, CLIP, patch_size=14)
    assert load_processor(told).vision.patch_size == 14
    # What the folder says is compared with the model later, so it counts.
    assert load_processor(told, patch_sizes=PatchSizes(patch_size=28)).vision.patch_size == 14
    both = write_folder(tmp_path / "both", tokenizer, CLIP, model=PATCH_14, patch_size=28)
    assert load_processor(both).vision.patch_size == 14


def test_sizes_of_configs():
    assert PatchSizes.of_config({}) is None
    assert PatchSizes.of_config(PATCH_14) == PatchSizes(patch_size=14)
    expected = PatchSizes(patch_size=14, spatial_merge_size=2)
    assert PatchSizes.of_config(INTERNVL) == expected
    qwen = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    assert PatchSizes.of_config(qwen) == expected
    tiles = {**INTERNVL, "vision_config": {"patch_size": [14, 14], "image_size": [448, 448]}}
    assert PatchSizes.of_config(tiles) == replace(expected, image_size=448)
    for wrong in (
        {"vision_config": {"patch_size": "14"}},
        {"vision_config": {"patch_size": 14, "image_size": [448, 336]}},
        {"vision_config": {"patch_size": [14, 16]}},
        {"vision_config": {"patch_size": 14}, "downsample_ratio": 0},
        {"vision_config": {"patch_size": 14, "spatial_merge_size": -1}},
    ):
        with pytest.raises(ValueError, match="expected"):
            PatchSizes.of_config(wrong)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"image_processor_type": "ViTImageProcessor"}, "'ViTImageProcessor', where one of Qwen"),
        ({"image_processor_type": 5}, "image_processor_type 5"),
        ({"do_center_crop": False}, "do not make all images one size"),
        ({"do_center_crop": False, "do_resize": False}, "do not make all images one size"),
        ({"crop_size": {"height": 10**6, "width": 336}}, "do not make all images one size"),
        ({"crop_size": {"height": 13, "width": 336}}, "13 x 336 pixels, which are not whole"),
        ({"do_pad": True}, "do_pad"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path, config, said):
    with pytest.raises(ValueError, match=f"The image processor in {tmp_path} .*{said}"):
        llava(tmp_path, {**CLIP, **config})


def test_a_folder_for_images_of_another_size_is_refused(tmp_path):
    """Whether its config.json says so or the model that is trained."""
    said = f"The image processor in {tmp_path} .* 336 x 336 pixels, but the model takes 224 x 224"
    model = {**PATCH_14, "vision_config": {"patch_size": 14, "image_size": 224}}
    folder = write_folder(tmp_path, llama_tokenizer(legacy=True), CLIP, model=model)
    with pytest.raises(ValueError, match=said):
        load_processor(folder)
    (folder / "config.json").write_text(json.dumps(PATCH_14))
    with pytest.raises(ValueError, match=said):
        load_processor(folder, patch_sizes=PatchSizes(patch_size=14, image_size=224))
    fits = PatchSizes(patch_size=14, image_size=336)
    assert load_processor(folder, patch_sizes=fits).images.grid(9, 9) == (1, 24, 24)


def test_a_template_in_a_file_of_its_own(tmp_path):
    """As older folders have it; one of the tokenizer's stands above it."""
    folder = write_folder(tmp_path, llama_tokenizer(legacy=True), CLIP, model=PATCH_14)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": f"{template} "}))
    assert load_processor(folder).tokenizer.chat_template == template
    assert "chat_template.json" not in processor_digest(folder)
    (folder / "chat_template.jinja").unlink()
    assert load_processor(folder).tokenizer.chat_template == f"{template} "
    assert "chat_template.json" in processor_digest(folder)


def test_frames_that_are_not_whole_visual_tokens(tmp_path):
    with pytest.raises(ValueError, match="462 x 462 pixels, which are not whole visual tokens"):
        internvl(tmp_path, {**TILES, "size": {"height": 462, "width": 462}})


def test_a_folder_whose_images_have_another_number_of_tokens_is_refused(tmp_path):
    said = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "full"}
    folder = write_folder(tmp_path, llama_tokenizer(legacy=True), CLIP, model=PATCH_14, **said)
    with pytest.raises(ValueError, match="another number of tokens than patches"):
        load_processor(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({**said, "vision_feature_select_strategy": "default"})
    )
    assert load_processor(folder).images.grid(9, 9) == (1, 24, 24)


@pytest.mark.parametrize("limits", [{"min_pixels": 100}, {"max_pixels": 10**6}])
def test_limits_of_pixels_are_refused(tmp_path, limits):
    with pytest.raises(ValueError, match="makes all 336 x 336 pixels: leave them out"):
        llava(tmp_path, CLIP, pixel_limits=PixelLimits(**limits))


def test_limits_of_videos_are_refused(tmp_path):
    processor = llava(tmp_path, CLIP, pixel_limits=PixelLimits(video_max_pixels=10**6))
    with pytest.raises(ValueError, match="this model takes no videos: leave these flags out"):
        VideoProcessor(processor, TIMESTAMPS)


def test_images_that_would_grow_without_bound_are_refused_by_their_header(tmp_path):
    Image.new("L", (2, 402)).save(tmp_path / "narrow.png")
    for name, config in (("clip", CLIP), ("padded", PADDED)):
        processor = llava(tmp_path / name, config)
        videos = VideoProcessor(processor, TIMESTAMPS)
        with pytest.raises(ValueError, match=r"^here: image .* one side is 201 times the other"):
            KINDS["image"].grid(tmp_path / "narrow.png", Context(processor, videos, "here"))
        with pytest.raises(ValueError, match="one side is 201 times"):
            processor.images.coded([Image.new("RGB", (2, 402))])
    padded = load_processor(tmp_path / "padded").images
    with pytest.raises(ValueError, match="padded to a square, it has more than"):
        padded.grid(100, 13_378)
    assert padded.grid(100, 13_377) == (1, 24, 24)
    assert llava(tmp_path / "siglip", SIGLIP).images.grid(1, 10_000) == (1, 27, 27)


def test_qwen_s_folders_stay_qwen_s(processor, tmp_path):
    """Also those that do not name their image processor, and whatever config.json says."""
    shutil.copytree(processor.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    config = json.loads(file.read_text())
    for name in (None, "Qwen2VLImageProcessorFast", "Qwen2_5_VLImageProcessor"):
        config["image_processor_type"] = name
        file.write_text(json.dumps(config))
        again = load_processor(tmp_path, patch_sizes=PatchSizes(patch_size=99)).images
        assert isinstance(again, QwenPatches)
        assert (again.patch_size, again.spatial_merge_size, again.patch_dim) == (16, 2, 1536)
