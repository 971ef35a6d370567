"""Rows that fit no format: what keys without a use mean, and what pydantic's errors say."""

import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

# What keys mean that LoongPlug does not use. Nothing: they are no matter of training, and may stand
# anywhere. The others are refused; so are all that are not here, but in turns and parts alone.
MEANINGS = {
    key: meaning
    for keys, meaning in {
        "id uuid message_id parent_id turn_id name timestamp created created_at time date detail"
        " lang language model source metadata finish_reason cache_control": "",
        "rejected rejected_response rejected_messages rejected_images rejected_videos"
        " rejected_audios chosen": "another answer to compare with: LoongPlug trains on one",
        "tools functions tool_calls function_call": "tools: LoongPlug takes them from tools beside"
        " messages, tool_calls of an answer and the role tool",
        "objects": "boxes or points of objects: LoongPlug does not write them into the text",
        "img imgs image_path image_paths image_url image_urls video_path video_paths video_url"
        " video_urls audio_path audio_paths audio_url audio_urls": "media: LoongPlug takes them"
        " from images, videos and audios",
        "mask masks loss_mask loss_scale train_mask weights sample_weight train_on_inputs": "a"
        " mask: LoongPlug takes it from loss and weight of a turn",
        "instruction input output query response history": "turns: LoongPlug takes them from"
        " instruction, input, output and history, or from query, response and history",
        "kto_tag": "whether the answer is wanted: LoongPlug trains on all it is given",
        "system system_prompt": "what the system says: LoongPlug takes it from system beside turns",
        "documents chat_template chat_template_kwargs enable_thinking reasoning_content": "what the"
        " chat template is given: LoongPlug gives it the messages alone",
    }.items()
    for key in keys.split()
}

_MOST_ERRORS = 3  # of one row in one message


def described(error: ValidationError, row: dict[str, Any]) -> str:
    """The first errors of a row, each with its place in the row and what is there."""
    details = error.errors(include_url=False)
    found = "; ".join(_describe(detail, row) for detail in details[:_MOST_ERRORS])
    return found + f"; and {len(details) - _MOST_ERRORS} more" * (len(details) > _MOST_ERRORS)


def _describe(detail: Any, row: dict[str, Any]) -> str:
    location = detail["loc"]
    missing = detail["type"] == "missing"
    path, value = _place(location[:-1] if missing else location, row)
    if missing:
        return f"{path}.{location[-1]} is missing".removeprefix(".")
    if detail["type"] == "key":
        key = detail["ctx"]["key"]
        return (
            f"{path or 'the row'} has the key {key!r:.80} ({detail['msg']}): write what is meant"
            " as LoongPlug knows it, drop the key, or name it in --ignore-keys"
        )
    reason = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{path} is {reprlib.repr(value)}, but {reason}"


def _place(location: Sequence[int | str], value: Any) -> tuple[str, Any]:
    """The path in the row as in Python, and what is there; pydantic's tags are left out."""
    path, number = "", False
    for step in location:
        of_part = number and isinstance(value, dict) and step == value.get("type")
        number = isinstance(step, int)
        # What is JSON within a text is no place in the row.
        known = step in value if isinstance(value, dict) else number and isinstance(value, list)
        if known and not of_part:
            path += f"[{step}]" if number else f".{step}"
            value = value[step]
    return path.removeprefix("."), value
