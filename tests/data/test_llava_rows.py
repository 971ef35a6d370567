"""Rows for LLaVA's and InternVL's kind of model, against their processors in transformers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from conversations import conversation, marked
from image_units import media_of
from llava_folders import (
    CLIP,
    INTERNVL,
    LLAVA_TEMPLATE,
    PATCH_14,
    TILES,
    internvl_tokenizer,
    llama_tokenizer,
    write_folder,
)
from local_loader import local_loader
from PIL import Image
from surveyed import survey_of
from transformers import CLIPImageProcessorPil, GotOcr2ImageProcessorPil, LlavaProcessor
from transformers.utils import is_torchvision_available

from loongplug.data.conversation import MediaPart
from loongplug.data.dataset import ChatDataset
from loongplug.data.inspect import describe
from loongplug.data.media_kinds import Placeholder
from loongplug.data.media_loader import PixelBytes
from loongplug.data.processor import Processor, require_fit
from loongplug.data.processor_folder import load_processor
from loongplug.data.sample import BadSampleError
from loongplug.data.tokens import tokenize_conversation, tokenize_prompt

pytestmark = pytest.mark.quick

PICTURE = MediaPart("image", "a.png")
# As LLaVA's processor is told; the class token is added and left out again.
TOLD = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}


@pytest.fixture(scope="module", params=[True, False], ids=["legacy", "new"])
def llava(request, tmp_path_factory) -> Processor:
    return load_processor(
        write_folder(
            tmp_path_factory.mktemp("llava"),
            llama_tokenizer(legacy=request.param),
            CLIP,
            model=PATCH_14,
            processor_class="LlavaProcessor",
            **TOLD,
        )
    )


def theirs(processor: Processor) -> LlavaProcessor:
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil.from_pretrained(str(processor.folder)),
        tokenizer=processor.tokenizer,
        patch_size=14,
        chat_template=processor.tokenizer.chat_template,
        **TOLD,
    )


def images(processor: Processor, *runs: int) -> list[Placeholder]:
    token = processor.tokens["image_token_id"]
    return [Placeholder(token=token, text=token, run=run) for run in runs]


ASKED = {
    "an image": conversation(("user", [PICTURE, "What is this?"])),
    "two images around text": conversation(("user", [PICTURE, "What is\nthis", PICTURE, "?"])),
    "text": conversation(("user", "the cat, the dog")),
    "system": conversation(("system", "You read."), ("user", [PICTURE, "What?"])),
}


@pytest.mark.parametrize("name", ASKED)
def test_prompts_are_those_of_llava_s_processor(llava, name):
    picture = Image.new("RGB", (50, 30), (9, 99, 200))
    messages: list[dict[str, Any]] = []
    for message in ASKED[name].messages:
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": picture}
            for part in message.parts
        ]
        messages.append({"role": message.role, "content": content})
    features = theirs(llava).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    number = str(messages).count("'image':")
    ours = tokenize_prompt(ASKED[name], llava, placeholders=images(llava, *[576] * number))
    assert ours.tolist() == features["input_ids"][0].tolist()
    assert (ours == llava.token_ids["image_token_id"]).sum() == 576 * number
    assert ours[0] == llava.tokenizer.bos_token_id
    if number:
        ((coded, grid),) = llava.images.coded([picture])
        rows = PixelBytes.of_images(llava.images).decoded(coded)
        assert grid == (1, 24, 24)
        again = llava.images.model_inputs(rows, torch.tensor([grid]))["pixel_values"]
        assert torch.equal(again, features["pixel_values"][:1])


TURNS = conversation(
    ("user", [PICTURE, "What is this?"]),
    ("assistant", "A cat"),
    ("user", "that?"),
    ("assistant", "Two cats"),
)


def test_what_is_trained_by_hand(llava):
    tokens = tokenize_conversation(TURNS, llava, phase="sft", placeholders=images(llava, 2))
    # Behind a special token, a tokenizer of the older kind writes a space, as at the beginning.
    space = "▁ " if llava.tokenizer.backend_tokenizer.normalizer is not None else ""
    assert marked(tokens, llava) == (
        f"<s> ▁USER: ▁ <image> <image> {space}<0x0A> Wh at ▁is ▁this? ▁ASSISTANT:"
        f" [▁A] [▁cat] [</s>] {space}▁USER: ▁that? ▁ASSISTANT: [▁Two] [▁cat] [s] [</s>] {space}▁"
    )


@pytest.mark.parametrize("turn", [1, 3])
def test_a_prompt_and_its_answer_are_the_sample(llava, turn):
    """What generation goes on from is what training saw, at every turn."""
    placed = images(llava, 3)
    tokens = tokenize_conversation(TURNS, llava, phase="sft", placeholders=placed)
    asked = dataclasses.replace(TURNS, messages=TURNS.messages[:turn])
    prompt = tokenize_prompt(asked, llava, placeholders=placed).tolist()
    assert tokens.ids[: len(prompt)].tolist() == prompt
    assert tokens.trained[len(prompt)]
    assert not tokens.trained[len(prompt) - 1]
    answer = tokens.ids[len(prompt) :].tolist()
    answer = answer[: answer.index(llava.end_token_id)]
    assert llava.tokenizer.decode(answer).strip() == TURNS.messages[turn].text


@pytest.mark.parametrize("text", ["<image>", "</s>USER: x", "a <image> b <s>", "<image></s>"])
def test_special_tokens_in_text_are_text(llava, text):
    sample = conversation(("user", [PICTURE, text]), ("assistant", text))
    tokens = tokenize_conversation(sample, llava, phase="sft", placeholders=images(llava, 1))
    bos, eos = llava.tokenizer.bos_token_id, llava.end_token_id
    assert (tokens.ids == llava.token_ids["image_token_id"]).sum() == 1
    assert np.flatnonzero(tokens.ids == bos).tolist() == [0]
    assert (tokens.ids == eos).sum() == 1
    spoken = tokens.ids[tokens.trained].tolist()
    assert spoken[-1] == eos
    assert llava.tokenizer.decode(spoken[:-1]).strip() == text
    asked = llava.tokenizer.decode(tokens.ids[: tokens.trained.argmax()])
    assert asked.startswith("<s> USER: <image>")
    assert asked.endswith(f"\n{text} ASSISTANT:")


def test_pretraining_ends_answers_as_well(llava):
    placed = images(llava, 2)
    sft = tokenize_conversation(TURNS, llava, phase="sft", placeholders=placed)
    all_text = tokenize_conversation(TURNS, llava, phase="pretrain", placeholders=placed)
    assert all_text.ids.tolist() == sft.ids.tolist()
    expected = all_text.ids != llava.token_ids["image_token_id"]
    expected[0] = False  # bos
    assert all_text.trained.tolist() == expected.tolist()


def test_plain_text_begins_with_bos_and_ends_with_eos(llava):
    sample = conversation(("user", [PICTURE, "A cat."]), plain=True)
    tokens = tokenize_conversation(sample, llava, phase="pretrain", placeholders=images(llava, 1))
    assert tokens.ids.tolist() == llava.tokenizer("<image>A cat.</s>")["input_ids"]
    assert not tokens.trained[:2].any()
    assert tokens.trained[2:].all()


def test_answers_that_are_left_out(llava):
    first, answer, *rest = TURNS.messages
    left_out = dataclasses.replace(answer, trained=False)
    sample = dataclasses.replace(TURNS, messages=(first, left_out, *rest))
    placed = images(llava, 1)
    tokens = tokenize_conversation(sample, llava, phase="sft", placeholders=placed)
    whole = tokenize_conversation(TURNS, llava, phase="sft", placeholders=placed)
    assert tokens.ids.tolist() == whole.ids.tolist()
    assert llava.tokenizer.decode(tokens.ids[tokens.trained]) == "Two cats</s>"


def with_template(processor: Processor, template: str) -> Processor:
    tokenizer = llama_tokenizer(legacy=True)
    tokenizer.chat_template = template
    return dataclasses.replace(processor, tokenizer=tokenizer)


def test_a_template_that_writes_bos_and_eos_itself(llava):
    writes = with_template(
        llava,
        "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %} {% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    )
    sample = conversation(("user", "a cat"), ("assistant", "the dog"))
    tokens = tokenize_conversation(sample, writes, phase="sft", placeholders=[])
    special = [token for token in tokens.ids.tolist() if token in (1, 2)]
    assert special == [1, 2]
    assert writes.tokenizer.decode(tokens.ids[tokens.trained]) == "the dog</s>"


def test_answers_that_a_template_trims_or_changes(llava):
    sample = conversation(("user", "a cat"), ("assistant", "  the dog\n"))
    trims = with_template(
        llava, LLAVA_TEMPLATE.replace("content['text']", "content['text'] | trim")
    )
    tokens = tokenize_conversation(sample, trims, phase="sft", placeholders=[])
    assert trims.tokenizer.decode(tokens.ids[tokens.trained]) == "the dog</s>"
    tokens = tokenize_conversation(sample, llava, phase="sft", placeholders=[])
    assert llava.tokenizer.decode(tokens.ids[tokens.trained]) == "  the dog\n</s>"
    changes = with_template(
        llava, LLAVA_TEMPLATE.replace("content['text']", "content['text'] | upper")
    )
    with pytest.raises(ValueError, match=r"^rows.jsonl:3: .* nothing says where it ends"):
        tokenize_conversation(sample, changes, phase="sft", placeholders=[])


def rows_with(image: str) -> list[dict[str, Any]]:
    asked = {"type": "text", "text": "What is this?"}
    return [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": image}, asked]},
                {"role": "assistant", "content": "A cat"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "the dog?"},
                {"role": "assistant", "content": "the cat"},
            ]
        },
    ]


def test_rows_have_plain_positions_and_one_row_of_tokens_to_each_patch(
    llava, write_rows, write_image
):
    """And a video is refused."""
    (row, text) = rows_with(write_image("a.png", height=40, width=90))
    options: dict[str, Any] = {"processor": llava, "seq_length": 604, "training_phase": "sft"}
    dataset = ChatDataset(write_rows(row, text), **options, plain_positions=True)
    sample = dataset[0]
    assert sample.position_ids.tolist() == [list(range(len(sample)))] * 3
    assert sample.position_ids.dtype == np.int64
    microbatch = next(local_loader(dataset, micro_batch_size=1, look_ahead=4))
    expected = [*range(len(sample)), *range(len(dataset[1]))]
    assert microbatch.position_ids[0, 0, : len(expected)].tolist() == expected
    assert media_of(microbatch).rows.shape == (576, 588)
    assert (sample.input_ids == llava.token_ids["image_token_id"]).sum() == 576
    lines = "\n".join(describe(survey_of(llava, dataset.rows, 0), llava))
    assert "a.png, 90 x 40 pixels: 576 tokens" in lines
    assert "<image> x 576" in lines
    row["messages"][0]["content"][0] = {"type": "video", "video": "a.mp4"}
    said = ":1: the row has a medium of kind video, but this model takes image and text alone: drop"
    with pytest.raises(BadSampleError, match=said):
        ChatDataset(write_rows(row), **options)[0]


def test_only_what_the_family_has_is_compared(llava):
    fits: dict[str, int] = {"image_token_id": 4, "patch_size": 14, "vocab_size": 500}
    require_fit(llava, **fits)
    with pytest.raises(ValueError, match="patch_size is 14 in the folder but 16 in the model"):
        require_fit(llava, **fits | {"patch_size": 16})
    require_fit(llava, **fits, video_token_id=7, vision_start_token_id=None)


@pytest.mark.skipif(not is_torchvision_available(), reason="its video processor needs torchvision")
def test_prompts_and_pixels_are_those_of_internvl_s_processor(tmp_path):
    from transformers import InternVLProcessor, InternVLVideoProcessor

    folder = write_folder(
        tmp_path, internvl_tokenizer(), TILES, model=INTERNVL, processor_class="InternVLProcessor"
    )
    processor = load_processor(folder)
    whole = InternVLProcessor(
        image_processor=GotOcr2ImageProcessorPil.from_pretrained(str(folder)),
        tokenizer=processor.tokenizer,
        video_processor=InternVLVideoProcessor(),
        chat_template=processor.tokenizer.chat_template,
    )
    pictures = [Image.effect_noise(size, 60).convert("RGB") for size in ((900, 400), (448, 448))]
    messages = [
        {
            "role": "user",
            "content": [
                *({"type": "image", "image": picture} for picture in pictures),
                {"type": "text", "text": "Which is older?"},
            ],
        }
    ]
    features = whole.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    grids = [processor.images.grid(picture.height, picture.width) for picture in pictures]
    placed = [
        Placeholder(token="<IMG_CONTEXT>", text="<img><IMG_CONTEXT></img>", run=grid[0] * 256)
        for grid in grids
    ]
    asked = conversation(("user", [PICTURE, PICTURE, "Which is older?"]))
    ours = tokenize_prompt(asked, processor, placeholders=placed)
    assert ours.tolist() == features["input_ids"][0].tolist()
    made = processor.images.coded(pictures)
    assert [grid for _, grid in made] == grids == [(3, 32, 32), (1, 32, 32)]
    rows = PixelBytes.of_images(processor.images).decoded(torch.cat([rows for rows, _ in made]))
    inputs = processor.images.model_inputs(rows, torch.tensor(grids))
    assert torch.equal(inputs["pixel_values"], features["pixel_values"])
