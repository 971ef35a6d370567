"""Notes beside a run's checkpoints: small JSON files that are written whole and read with care."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def write_note(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path`` as a whole; makes its folder. For one rank."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_note(path: Path, *, keys: Collection[str], without: str) -> dict[str, Any] | None:
    """The note at ``path``; None where there is none. No collectives.

    ``keys``: what it is known by: a file with none of them is something else. ``without`` says what
    follows when the file is removed.

    Raises:
        ValueError: the file is damaged, or no such note.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(f"{path} is no file; remove it{without}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it{without}"
        ) from error
    if not isinstance(found, dict) or not found.keys() & set(keys):
        raise ValueError(
            f"{path} is no note of LoongPlug: it has none of {', '.join(keys)}; remove it{without}"
        )
    return found
