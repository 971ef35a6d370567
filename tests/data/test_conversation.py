from pathlib import Path
from typing import Any

import pytest

from loongplug.data.conversation import parse_conversation

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
    assert conversation.image_paths(Path("/data")) == (Path("/data/a.png"), Path("/b.png"))


USER = {"role": "user", "content": "hello"}


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
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "as images"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]},
            'part of type "image" has 3',
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "first message is the assist"),
    ],
)
def test_unknown_schema_names_the_place_and_the_fault(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_conversation(row, where="rows.jsonl:12")
    assert str(error.value).startswith("rows.jsonl:12: ")
