from pathlib import Path
from typing import Any

import pytest

from loongplug.data.conversation import Video, parse_conversation

pytestmark = pytest.mark.quick


def test_parts_and_strings_and_other_keys() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "a.png"},
                    {"type": "text", "text": "What "},
                    {"type": "video", "video": ["1.png", "/2.png"], "fps": 2},
                    {"type": "image", "image": "/b.png"},
                    {"type": "text", "text": "is it?"},
                ],
            },
        ],
        "id": 7,
    }
    conversation = parse_conversation(row, where="rows.jsonl:1")
    assert [message.role for message in conversation.messages] == ["system", "user"]
    assert [message.text for message in conversation.messages] == ["Be brief.", "What is it?"]
    assert conversation.media(Path("/data")) == (
        Path("/data/a.png"),
        Video((Path("/data/1.png"), Path("/2.png")), fps=2.0),
        Path("/b.png"),
    )


USER = {"role": "user", "content": "hello"}


def with_part(**part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": [], "id": 1}, r"unknown schema with keys \['conversations', 'id'\]"),
        ({"messages": []}, "unknown schema"),
        ({"messages": "hello"}, "unknown schema"),
        ({"messages": [{"from": "human", "value": "x"}]}, "message 1: role None is unknown"),
        ({"messages": [USER, "x"]}, "message 2: role 'x' is unknown"),
        ({"messages": [USER, {"role": "gpt", "content": "x"}]}, "role 'gpt' is unknown"),
        ({"messages": [{"role": "user"}]}, 'message 1: "content" is NoneType'),
        ({"messages": [{"role": "user", "content": []}]}, "non-empty list"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "part of type None"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "type 'audio'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]},
            'part of type "image" has 3',
        ),
        (
            with_part(type="video", video="clip.mp4", fps=2),
            "video 'clip.mp4' is one file, .* give its frames as image files, as in",
        ),
        (with_part(type="video", fps=2), 'has None under "video": expected the paths'),
        (with_part(type="video", video=[], fps=2), r"has \[\] under .* at least one frame"),
        (with_part(type="video", video=["a.png", 3], fps=2), r"has \['a.png', 3\] under"),
        (with_part(type="video", video=["a.png"]), 'has None under "fps"'),
        (with_part(type="video", video=["a.png"], fps=0), 'has 0 under "fps"'),
        (with_part(type="video", video=["a.png"], fps=-1.5), "a number above 0"),
        (with_part(type="video", video=["a.png"], fps="2"), "has '2' under"),
        (with_part(type="video", video=["a.png"], fps=True), "has True under"),
        (with_part(type="video", video=["a.png"], fps=float("inf")), "has inf under"),
        (with_part(type="video", video=["a.png"], fps=float("nan")), "has nan under"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "first message is the assist"),
    ],
)
def test_unknown_schema_names_the_place_and_the_fault(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_conversation(row, where="rows.jsonl:12")
    assert str(error.value).startswith("rows.jsonl:12: ")
