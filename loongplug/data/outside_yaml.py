"""YAML files from outside, looked through before anything is built of them."""

from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]

MAX_YAML_BYTES = 2**20
MAX_YAML_DEPTH = 64  # lists and mappings within each other
MAX_YAML_NODES = 100_000  # of the whole file, each alias counted as what it stands for


def require_bounded_yaml(path: Path) -> None:
    """ValueError, in a sentence with the file, for one that is not text or too much of it.

    The parser's events are counted; nothing is built, so that aliases of aliases cost nothing.
    What is not YAML is left to its reader.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    if len(content) > MAX_YAML_BYTES:
        raise ValueError(
            f"{path} has more than {MAX_YAML_BYTES:,} bytes, the most that a YAML file may have"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 (byte {error.start}): give a YAML file"
        ) from None
    with suppress(yaml.YAMLError):
        if problem := _problem(text):
            raise ValueError(f"{path} {problem}")


def _problem(text: str) -> str | None:
    """Which of the limits the text exceeds, None for none."""
    anchors: dict[str, int] = {}  # nodes of what each stands for
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and nodes so far
    total = 0  # with what aliases stand for
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > MAX_YAML_DEPTH:
                return f"nests more than {MAX_YAML_DEPTH} lists and mappings within each other"
            if event.anchor is not None:
                anchors.pop(event.anchor, None)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            if anchor is not None:
                anchors[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor is not None:
                anchors[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                return f"has an alias *{event.anchor} with no anchor before it, or within its own"
            size = anchors[event.anchor]
        else:
            continue
        if open_nodes:
            anchor, before = open_nodes.pop()
            open_nodes.append((anchor, before + size))
            total = before + size
        if size > MAX_YAML_NODES or total > MAX_YAML_NODES:
            return f"has more than {MAX_YAML_NODES:,} values, its aliases counted as what they name"
    return None
