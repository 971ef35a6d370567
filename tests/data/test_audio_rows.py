"""Rows with sounds: tokens and frames against the processors of transformers, and refusals."""

import base64
import dataclasses
from pathlib import Path
from typing import Any

import made_media
import numpy as np
import pytest
import torch
from audio_folders import (
    AUDIO,
    OMNI,
    SECONDS,
    extractor,
    noise,
    qwen2_audio,
    write_omni,
    write_qwen2_audio,
    write_wav,
)
from surveyed import grids_of, media_in, settings_of, survey_of
from transformers import Qwen2AudioProcessor

from loongplug.data.audio_files import decode_audio
from loongplug.data.check import index
from loongplug.data.conversation import AudioClip
from loongplug.data.dataset import ChatDataset
from loongplug.data.extent_index import ExtentTable
from loongplug.data.inspect import describe
from loongplug.data.media_files import InlineFile
from loongplug.data.media_kinds import KINDS
from loongplug.data.media_loader import MediaLoader
from loongplug.data.media_sizes import AudioSizes
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.sample import BadSampleError

pytestmark = pytest.mark.quick

WHERE = "rows.jsonl:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_qwen2_audio(tmp_path_factory.mktemp("qwen2_audio"))


@pytest.fixture(scope="module")
def hearing(folder) -> Processor:
    return load_processor(folder)


@pytest.fixture(scope="module")
def theirs() -> Qwen2AudioProcessor:
    return qwen2_audio()


@pytest.fixture(scope="module")
def omni(tmp_path_factory) -> Processor:
    return load_processor(write_omni(tmp_path_factory.mktemp("omni")))


def asked(*parts: Any, answer: str = "A cow.") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": list(parts)},
            {"role": "assistant", "content": answer},
        ]
    }


def audio(name: str) -> dict[str, Any]:
    return {"type": "audio", "audio": name}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chats(rows: Any, processor: Processor, **options: Any) -> ChatDataset:
    options = {"seq_length": 1_000, "training_phase": "sft", **options}
    return ChatDataset(rows, processor=processor, **options)


def sounds_of(dataset: ChatDataset, number: int = 0) -> Any:
    media = MediaLoader(dataset.processor, videos=dataset.videos)
    return media.load(media_in(dataset, number), where=WHERE)


def words_of(dataset: ChatDataset, number: int = 0) -> str:
    return str(dataset.processor.tokenizer.decode(dataset[number].input_ids))


@pytest.mark.parametrize("lengths", [[321], [8_000, 16_000 * SECONDS], [5_000, 5_001, 700]])
def test_rows_agree_with_transformers(tmp_path, write_rows, hearing, theirs, lengths):
    parts: list[Any] = [text("Listen.")]
    for number, samples in enumerate(lengths):
        write_wav(tmp_path / f"{number}.wav", noise(samples, seed=number))
        parts += [audio(f"{number}.wav"), text(f"What is {number}?")]
    row = asked(*parts)
    dataset = chats(write_rows(row), hearing)
    sample, unit = dataset[0], sounds_of(dataset)
    heard = [decode_audio(medium, where=WHERE) for medium in media_in(dataset, 0)]
    rendered = theirs.apply_chat_template(row["messages"], tokenize=False)
    expected = theirs(text=[rendered], audio=heard, return_tensors="pt", sampling_rate=16_000)
    assert sample.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert hearing.audio is not None
    made = hearing.audio.model_inputs(unit.rows, unit.grids)
    for name in ("input_features", "feature_attention_mask"):
        torch.testing.assert_close(made[name], expected[name], rtol=0, atol=1e-6)
    counts = [KINDS["audio"].tokens(grid, hearing) for grid in grids_of(sample)]
    assert sum(counts) == (sample.input_ids == hearing.token_ids["audio_token_id"]).sum()
    assert sample.position_ids.tolist() == [list(range(len(sample)))] * 3
    # The answer with its end, and nothing else.
    trained = sample.labels[sample.loss_mask > 0]
    assert hearing.tokenizer.decode(trained) == "A cow.<|im_end|>"


def test_folders_as_published_and_as_saved_are_the_same(tmp_path, write_rows, hearing):
    published = load_processor(write_qwen2_audio(tmp_path / "hub", published=True))
    assert published.images is hearing.images is None
    assert published.tokens == hearing.tokens
    assert tuple(published.tokens.values()) == AUDIO
    ids = [hearing.tokenizer.convert_tokens_to_ids(each) for each in AUDIO]
    assert [hearing.token_ids[f"audio_{each}token_id"] for each in ("", "start_", "end_")] == ids
    assert (hearing.places(*KINDS), hearing.places("image", "video")) == ((ids[0],), ())
    write_wav(tmp_path / "a.wav", noise(4_000))
    path = write_rows(asked(audio("a.wav"), text("What?")))
    one, other = (chats(path, each) for each in (hearing, published))
    assert one[0].input_ids.tolist() == other[0].input_ids.tolist()
    assert torch.equal(sounds_of(one).rows, sounds_of(other).rows)


def test_every_way_to_write_a_sound_is_the_same(tmp_path, write_rows, hearing):
    write_wav(tmp_path / "a.wav", noise(4_000))
    inline = base64.b64encode((tmp_path / "a.wav").read_bytes()).decode()
    ask, answer = text("What?"), {"role": "assistant", "content": "A cow."}
    beside = {"messages": [{"role": "user", "content": "<audio>\nWhat?"}, answer]}
    turns = [{"from": "human", "value": "<audio>What?"}, {"from": "gpt", "value": "A cow."}]
    rows = [
        asked(audio("a.wav"), ask),
        asked({"type": "audio_url", "audio_url": {"url": "a.wav"}}, ask),
        asked(audio(f"data:audio/wav;base64,{inline}"), ask),
        beside | {"audios": ["a.wav"]},
        {"conversations": turns, "audio": "a.wav"},
    ]
    dataset = chats(write_rows(*rows), hearing)
    expected = dataset[0].input_ids.tolist()
    frames = sounds_of(dataset).rows
    for number in range(1, len(rows)):
        assert dataset[number].input_ids.tolist() == expected, number
        assert torch.equal(sounds_of(dataset, number).rows, frames)
    (clip,) = media_in(dataset, 2)
    assert isinstance(clip, AudioClip)
    assert isinstance(clip.path, InlineFile)


def test_plain_text_has_the_marks_around_a_sound(tmp_path, write_rows, hearing):
    write_wav(tmp_path / "a.wav", noise(1_600))  # 10 frames, 5 states, 2 tokens
    path = write_rows({"text": "<audio>\nA cow.", "audios": ["a.wav"]})
    dataset = chats(path, hearing, training_phase="pretrain")
    said = "<|audio_bos|><|AUDIO|><|AUDIO|><|audio_eos|>A cow.<|im_end|>"
    assert words_of(dataset) == said
    sample = dataset[0]
    trained = sample.labels[sample.loss_mask > 0]
    assert dataset.processor.tokenizer.decode(trained) == "A cow.<|im_end|>"


def test_images_and_sounds_in_one_row(tmp_path, write_rows, omni):
    write_wav(tmp_path / "a.wav", noise(3_200, seed=1))
    write_wav(tmp_path / "b.wav", noise(6_400, seed=2))
    made_media.picture(56, 84).save(tmp_path / "a.png")
    image = {"type": "image", "image": "a.png"}
    dataset = chats(write_rows(asked(audio("a.wav"), image, audio("b.wav"), text("Which?"))), omni)
    sample = dataset[0]
    assert words_of(dataset).startswith(
        f"<|im_start|>user\n<|audio_bos|>{'<|AUDIO|>' * 5}<|audio_eos|><|vision_bos|>"
        f"{'<|IMAGE|>' * 6}<|vision_eos|><|audio_bos|>{'<|AUDIO|>' * 10}<|audio_eos|>Which?"
    )
    assert tuple(omni.tokens.values()) == (*OMNI, *AUDIO)
    assert grids_of(sample) == ((1, 1, 20), (1, 4, 6), (1, 1, 40))
    # Sounds count as text; of the image, two rows of three columns behind 20 tokens.
    start = int(np.flatnonzero(sample.input_ids == omni.token_ids["image_token_id"])[0])
    assert sample.position_ids[1, start : start + 6].tolist() == [start] * 3 + [start + 1] * 3
    assert sample.position_ids[0, start + 6] == start + 3
    media, loader = media_in(dataset, 0), MediaLoader(omni, videos=dataset.videos)
    assert loader.load(media[::2], where=WHERE).grids.tolist() == [[1, 1, 20], [1, 1, 40]]
    assert loader.load(media[1:2], where=WHERE).rows.shape == (24, omni.vision.patch_dim)


def too_long(path: Path) -> None:
    write_wav(path, noise(16_000 * SECONDS + 1))


def too_short(path: Path) -> None:
    write_wav(path, noise(320))


def empty(path: Path) -> None:
    write_wav(path, noise(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (too_long, "a.wav cannot be used: it is longer than the 2 seconds that the model takes"),
        (too_short, r"it lasts 0\.0200 seconds, which is too short for a token: drop the row, or"),
        (empty, r"it lasts 0\.0000 seconds, which is too short for a token"),
    ],
)
def test_a_sound_that_cannot_be_used_is_a_bad_sample(tmp_path, write_rows, hearing, make, words):
    make(tmp_path / "a.wav")
    path = write_rows(asked(audio("a.wav"), text("What?")))
    with pytest.raises(BadSampleError, match=f"rows.jsonl:1: .*{words}") as caught:
        chats(path, hearing)[0]
    assert caught.value.sample.kind == "media"
    assert "\n" not in str(caught.value)
    checked = survey_of(hearing, JsonlIndex(path), 0)
    (finding,) = checked.findings
    assert finding == caught.value.sample


def test_media_that_a_model_does_not_take_are_refused(
    tmp_path, write_rows, write_image, processor, hearing
):
    write_wav(tmp_path / "a.wav", noise(3_200))
    image = {"type": "image", "image": write_image("a.png", height=32, width=32)}
    video = {"type": "video", "video": ["a.png"], "fps": 1}
    deaf = dataclasses.replace(hearing, audio=None)
    for taken, part, words in (
        (
            processor,
            audio("a.wav"),
            "of kind audio, but this model takes image, video and text al",
        ),
        (
            hearing,
            image,
            "has a medium of kind image, but this model takes audio and text alone: ",
        ),
        (
            hearing,
            video,
            "has a medium of kind video, but this model takes audio and text alone: ",
        ),
        (deaf, audio("a.wav"), "has a sound, but there is no feature extractor in .*: copy it"),
    ):
        with pytest.raises(BadSampleError, match=words) as caught:
            chats(write_rows(asked(part, text("What?"))), taken)[0]
        assert caught.value.sample.kind == "media"


def test_check_inspect_and_index_take_sounds(tmp_path, write_rows, folder, hearing, capsys):
    write_wav(tmp_path / "a.wav", noise(8_000), rate=8_000)  # 1 second, 25 tokens
    path = write_rows(asked(audio("a.wav"), text("What?")), asked(text("Who?")))
    found = survey_of(hearing, JsonlIndex(path), 0)
    dataset = chats(path, hearing)
    assert found.findings == ()
    described = "\n".join(describe(found, hearing))
    assert ", 1 sounds\n" in described
    assert f"  audio {tmp_path / 'a.wav'}, 1.00 seconds: 25 tokens\n" in described
    assert "Audio 1: <|audio_bos|><|AUDIO|> x 25<|audio_eos|>\\n" in described
    (place,) = index([str(path)], settings_of(folder), processes=1)
    _, sizes = ExtentTable.read(place)
    assert sizes.tokens.tolist() == [len(dataset[0]), len(dataset[1])]
    assert sizes.grids.tolist() == [[1, 1, 102]]
    assert ["audio", "tokens", "25", "25", "25", "25"] in [
        line.split() for line in capsys.readouterr().err.splitlines()
    ]


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def of_others(folder: Path) -> None:
    (folder / "config.json").write_text('{"audio_config": {"model_type": "whisper"}}')


def too_few_bands(folder: Path) -> None:
    extractor(feature_size=8).save_pretrained(str(folder))


def without_tokens(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(file.read_text().replace("<|AUDIO|>", "<|SOUND|>"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_config, "does not say how many tokens a sound has: put the model's config"),
        (of_others, "config.json cannot be used: audio_config has model_type 'whisper', where"),
        (too_few_bands, "extractor in .* cannot be used: feature_size 8, where 16 was expected"),
        (without_tokens, r"The tokenizer in .* has no <\|AUDIO\|>"),
    ],
)
def test_folders_that_do_not_fit_are_refused(tmp_path, change, words):
    folder = write_qwen2_audio(tmp_path, published=True)
    change(folder)
    with pytest.raises(ValueError, match=words):
        load_processor(folder)


def test_a_family_says_what_it_takes(tmp_path, folder, omni):
    """What a model has no token for is left out; what it has to have, a folder may not lack."""
    sizes = AudioSizes(mel_bins=16, longest=100, behind=2)
    told = load_processor(folder, tokens={"audio_token_id": "<|AUDIO|>"}, audio_sizes=sizes)
    assert told.audio is not None
    assert told.audio.most_samples == 16_000
    assert "audio_start_token_id" not in told.token_ids
    sees = {name: text for name, text in omni.tokens.items() if not name.startswith("audio")}
    seeing = load_processor(omni.folder, tokens=sees)
    assert seeing.audio is None
    assert "audio_token_id" not in seeing.token_ids
    with pytest.raises(ValueError, match=r"No image processor in .*, which is for sounds"):
        load_processor(folder, tokens=sees)
