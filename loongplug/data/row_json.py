"""A row's bytes to its dictionary, with a bound on how many there may be."""

import json
from typing import Any

MAX_ROW_MIB = 64  # --max-row-mib; to tokenize a text takes 200 to 250 times its size in memory


class _DuplicateKeyError(ValueError):
    """An object has a key twice; parsers differ in which of the two they take."""


def require_row_size(size: int, *, max_row_mib: int, where: str) -> None:
    """ValueError for a row of more bytes than a row may have."""
    if size > max_row_mib * 2**20:
        raise ValueError(
            f"{where}: the row has {size / 2**20:.1f} MiB, but --max-row-mib is {max_row_mib}:"
            " split or drop the row, or raise the limit."
        )


def parse_row_json(content: bytes) -> Any:
    """What the JSON says; ValueError, without a place, for what is none or has a key twice."""
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except _DuplicateKeyError:
        raise
    except RecursionError as error:
        raise ValueError("not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # also bytes that are no UTF-8
        raise ValueError(f"not JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKeyError(
            f"an object of the row has the key {json.dumps(twice)[:80]} twice: leave one of them"
        )
    return found
