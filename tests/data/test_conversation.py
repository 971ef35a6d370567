"""Rows in every format to one and the same conversation, and rows in none."""

from pathlib import Path
from typing import Any

import pytest

from loongplug.data.conversation import Conversation, MediaPart, Part, parse_conversation

pytestmark = pytest.mark.quick


def test_parts_and_strings_and_other_keys():
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "a.png"},
                    {"type": "text", "text": "What "},
                    {"type": "video", "video": ["1.png", "/2.png"], "fps": 2},
                    {"type": "image_url", "image_url": {"url": "file:///b.png"}},
                    {"type": "image_url", "image_url": "c.png"},
                    {"type": "video", "video": "clip.mp4"},
                    {"type": "video_url", "video_url": {"url": "d.mp4"}, "fps": 0.5},
                    {"type": "text", "text": "is it?"},
                ],
            },
        ],
        "id": 7,
        "image_id": 3,
    }
    conversation = parse_conversation(row, where="rows.jsonl:1")
    assert [message.role for message in conversation.messages] == ["system", "user"]
    assert [message.text for message in conversation.messages] == ["Be brief.", "What is it?"]
    assert not conversation.plain
    assert conversation.media(Path("/data")) == (
        MediaPart("image", Path("/data/a.png")),
        MediaPart("video", (Path("/data/1.png"), Path("/2.png")), fps=2.0),
        MediaPart("image", Path("/b.png")),
        MediaPart("image", Path("/data/c.png")),
        MediaPart("video", Path("/data/clip.mp4"), fps=None),
        MediaPart("video", Path("/data/d.mp4"), fps=0.5),
    )


def as_parts(conversation: Conversation) -> list[tuple[str, list[Any]]]:
    def shown(part: Part) -> Any:
        if isinstance(part, str):
            return "text", part
        return (part.source, part.fps) if part.kind == "video" else (part.kind, part.source)

    return [(m.role, [shown(part) for part in m.parts]) for m in conversation.messages]


TWO_IMAGES = [
    ("system", [("text", "Be brief.")]),
    ("user", [("image", "a.png"), ("text", "Same as"), ("image", "b.png"), ("text", "?")]),
    ("assistant", [("text", "No.")]),
]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "<image>\nSame as\n<image>?"},
    {"from": "gpt", "value": "No."},
]
OPENAI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<image>Same as<image>?"},
    {"role": "assistant", "content": "No."},
]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT, "images": ["a.png", "b.png"]},
        {"conversations": SHAREGPT, "image": ["a.png", "b.png"], "id": "x"},
        {"conversations": SHAREGPT, "image": "a.png", "images": ["b.png"]},
        {"conversations": SHAREGPT[1:], "system": "Be brief.", "images": ["a.png", "b.png"]},
        {"messages": OPENAI, "images": ["a.png", "b.png"]},
    ],
)
def test_markers_are_replaced_in_their_order(row):
    assert as_parts(parse_conversation(row, where="r:1")) == TWO_IMAGES


def test_images_and_videos_in_one_text():
    row = {
        "conversations": [
            {"from": "user", "value": "<video><image>Go\n\n<video>"},
            {"from": "assistant", "value": "Done <3."},
        ],
        "image": "a.png",
        "video": "v.mp4",
        "videos": [["0.png", "1.png"]],
        "fps": 4,
    }
    assert as_parts(parse_conversation(row, where="r:1")) == [
        ("user", [("v.mp4", 4), ("image", "a.png"), ("text", "Go\n"), (("0.png", "1.png"), 4)]),
        ("assistant", [("text", "Done <3.")]),
    ]


def test_messages_without_media_beside_them_keep_what_looks_like_a_marker():
    turns = [{"role": "user", "content": "<image>\nis an SVG tag"}]
    conversation = parse_conversation({"messages": turns}, where="r:1")
    assert as_parts(conversation) == [("user", [("text", "<image>\nis an SVG tag")])]


def test_plain_text():
    conversation = parse_conversation({"text": "A <video> tag.\n"}, where="r:1")
    assert conversation.plain
    assert as_parts(conversation) == [("text", [("text", "A <video> tag.\n")])]
    captioned = parse_conversation({"text": "<image>\nA cat.", "image": "a.png"}, where="r:1")
    assert as_parts(captioned) == [("text", [("image", "a.png"), ("text", "A cat.")])]


HALF = "\ud800 hi"  # what JSON's escape "\\ud800" alone gives
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "yes"}
HUMAN = {"from": "human", "value": "hello"}


def with_part(**part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversation": [], "id": 1}, r"unknown schema with keys \['conversation', 'id'\]: .*"),
        ({"messages": []}, r"messages is \[\], but list should have at least 1 item"),
        ({"messages": "hello"}, "messages is 'hello', but input should be a valid list"),
        (
            {"messages": [{"from": "human", "value": "x"}]},
            r"messages\[0\] has the key 'from' \(LoongPlug knows loss, .*content, .* there",
        ),
        (
            {"messages": [USER, {"role": "gpt", "content": "x"}]},
            r"messages\[1\]\.role is 'gpt', but input should be 'system', .* or 'tool'",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content is missing"),
        ({"messages": [{"role": "user", "content": []}]}, r"content is \[\], but .* at least 1"),
        (with_part(type="sound"), r"content\[0\] is {'type': 'sound'}, but .*'image_url'"),
        *(
            (
                with_part(type=kind),
                f"part of type {kind} has no path, and the row has no {kind}s beside",
            )
            for kind in ("audio", "image", "video")
        ),
        (
            with_part(type="audio", audio_url="a.wav"),
            r"content\[0\] has the key 'audio_url' \(LoongPlug knows type, audio there",
        ),
        (with_part(type="audio", audio="data:audio/wav,x"), "is not a file that can be read"),
        (with_part(type="image_url", image_url={}), r"\[0\]\.image_url\.url is missing"),
        (with_part(type="image", image=""), "part of type image has no path"),
        (
            with_part(type="image_url", image_url=""),
            "path of an image, a video or a sound is empty",
        ),
        (with_part(type="video", video=[], fps=2), "part of type video has no path"),
        (with_part(type="video", video=["a.png"]), 'as frames has no "fps": give how many'),
        (with_part(type="video", video=["a.png"], fps=0), "fps is 0, but .* or equal to 0.001"),
        (with_part(type="video", video=["a.png"], fps="2"), "fps is '2', but .* valid number"),
        (with_part(type="video", video=["a.png"], fps=float("nan")), "fps is nan"),
        *(
            (with_part(type="image", image=f"{scheme}://x/a.png"), "nothing is downloaded but s3:")
            for scheme in ("https", "memory", "local", "gs", "S3")
        ),
        (
            with_part(type="image_url", image_url="data:image/png;base64,iVB"),
            "not a file that can be",
        ),
        (with_part(type="image", image="data:image/png,iVBO"), "not a file that can be read"),
        (with_part(type="video", video="data:video/mp4;base64,iVBO"), "not a file here"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "first message is the assist"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 2, .* is empty"),
        (
            {"conversations": [HUMAN, {"from": "tool", "value": "x"}]},
            r"conversations\[1\]\.from is 'tool', but",
        ),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\]\.value is missing"),
        ({"conversations": [HUMAN], "image": "a"}, "0 <image> markers in the text for 1 images"),
        (
            {"conversations": [{"from": "human", "value": "<image>"}]},
            "1 <image> markers in the text for 0 images of the row: write one <image> where",
        ),
        (
            {"conversations": [HUMAN | {"value": "<video>"}], "videos": ["a", "b"]},
            "1 <video> markers in the text for 2 videos",
        ),
        (
            {"conversations": [HUMAN | {"value": "<video>"}], "videos": [["a"]]},
            'as frames has no "fps"',
        ),
        ({"conversations": [HUMAN], "images": "a.png"}, "images is 'a.png', but .* valid list"),
        (with_part(type="text", text="x") | {"images": ["a"]}, "0 <image> markers .* for 1 images"),
        (
            {"messages": [USER], "conversations": [HUMAN]},
            "the keys of 2 formats, messages and conversations: keep the one",
        ),
        (
            {"text": "x", "conversations": [HUMAN], "messages": 3},
            "the keys of 3 formats, messages and conversations and text",
        ),
        (
            {"messages": [USER, {"role": "function", "content": "4"}]},
            r"messages\[1\]\.role is 'function', but",
        ),
        (
            {"messages": [USER, ANSWER | {"function_call": {"name": "add"}}]},
            r"\[1\] has the key 'function_call'.*tool_calls",
        ),
        ({"text": "\n"}, "the text is empty"),
        ({"text": HALF}, r"text is '\\ud800 hi', but .*lone surrogate"),
        (with_part(type="text", text=HALF), r"content\[0\]\.text is .*lone"),
        ({"conversations": [{"from": "human", "value": HALF}]}, r"\[0\]\.value is .*lone"),
        (with_part(type="image", image="\ud800.png"), r"content\[0\]\.image is .*lone"),
        (with_part(type="image_url", image_url={"url": HALF}), r"image_url\.url is .*lone"),
        ({"text": "<image>", "images": ["\ud800.png"]}, r"images\[0\] is .*lone"),
        ({"messages": [{"role": HALF, "content": "Hi"}]}, r"\[0\]\.role is"),
        (with_part(type=HALF), r"content\[0\]"),
        (
            {"messages": [USER, ANSWER | {"loss": False, "weight": 1}]},
            "loss is False and weight 1: give one",
        ),
        ({"messages": [USER | {"loss": True}, ANSWER]}, "turn of the user asks to be trained on"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight is 0.5, but"),
        ({"messages": [USER, ANSWER | {"loss": "no"}]}, "loss is 'no', but"),
    ],
)
def test_bad_rows_name_the_place_and_the_fault(row, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_conversation(row, where="rows.jsonl:12")
    assert str(error.value).encode().startswith(b"rows.jsonl:12: ")  # it can be printed


def test_many_faults_are_told_three_at_a_time():
    with pytest.raises(ValueError, match=r"messages\[2\]\.role is missing; and 5 more\.") as error:
        parse_conversation({"messages": [{"content": "x"} for _ in range(8)]}, where="r:1")
    assert "messages[3]" not in str(error.value)


def trained(*said: dict[str, Any], key: str = "messages") -> list[bool]:
    return [each.trained for each in parse_conversation({key: [*said]}, where="r:1").messages]


def test_turns_say_whether_they_are_trained_on():
    assert trained(USER, ANSWER) == [True, True]
    assert trained(USER, ANSWER | {"loss": False}, USER, ANSWER) == [True, False, True, True]
    assert trained(USER | {"loss": False}, ANSWER | {"weight": 0}) == [False, False]
    assert trained(USER, ANSWER | {"loss": True, "weight": 1}) == [True, True]
    gpt = {"from": "gpt", "value": "yes"}
    assert trained(HUMAN, gpt | {"loss": False}, key="conversations") == [True, False]
    beside = {"images": ["a.png"], "messages": [USER | {"content": "<image>"}, ANSWER]}
    beside["messages"][1]["loss"] = False
    assert not parse_conversation(beside, where="r:1").messages[1].trained


NOTHING = (None, "", "[]", [], {}, {"ref": [], "bbox": []})  # as tables write it


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rejected_response", "no"),
        ("objects", {"ref": ["cat"], "bbox": [[0, 0, 1, 1]]}),
        ("function_call", {"name": "search"}),
        ("image_path", "a.png"),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_keys_that_mean_something_elsewhere_are_refused_by_name(key, value):
    row = {"messages": [USER, ANSWER]}
    for nothing in NOTHING:
        assert not parse_conversation(row | {key: nothing}, where="r:1").remarks
    with pytest.raises(ValueError, match=rf"r:1: the row has the key '{key}' \(.*--ignore-keys"):
        parse_conversation(row | {key: value}, where="r:1")
    kept = parse_conversation(row | {key: value}, where="r:1", ignored=(key,))
    assert kept.remarks == (("key", key),)


def test_parts_without_a_path_take_the_rows_media():
    content = [{"type": "image"}, {"type": "text", "text": "<image> and"}, {"type": "video"}]
    row = {
        "messages": [{"role": "user", "content": [*content, {"type": "image"}]}],
        "images": ["a.png", "b.png"],
        "videos": ["c.mp4"],
    }
    assert as_parts(parse_conversation(row, where="r:1")) == [
        (
            "user",
            [
                ("image", "a.png"),
                ("text", "<image> and"),
                ("c.mp4", None),
                ("image", "b.png"),
            ],
        )
    ]
    with pytest.raises(ValueError, match="2 <image> markers in the text for 1 images"):
        parse_conversation(row | {"images": ["a.png"]}, where="r:1")


def test_a_part_s_rate_is_of_its_video():
    video = {"type": "video", "fps": 4.0}
    row = {"messages": [{"role": "user", "content": [video, {"type": "video"}]}], "fps": 2.0}
    beside = row | {"videos": [["1.png", "2.png"], "c.mp4"]}
    assert parse_conversation(beside, where="r:1").messages[0].parts == (
        MediaPart("video", ("1.png", "2.png"), 4.0),
        MediaPart("video", "c.mp4", 2.0),
    )
