"""Parts of a page that a program fills, between two comments with the part's name."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def filled(page: str, name: str, content: str) -> str:
    """``page``, a file's content, with ``content`` between the marks of ``name``.

    Raises:
        ValueError: the marks are not there once each.
    """
    before, _, behind = _parted(page, name)
    return f"{before}{content}{behind}"


def content(page: str, name: str) -> str:
    """What stands between the marks of ``name``. Raises as :func:`filled` does."""
    return _parted(page, name)[1]


def write(arguments: Sequence[str], parts: Mapping[str, str]) -> None:
    """Write parts, by their names, into the file that is given, or print them."""
    if not arguments:
        print(*parts.values(), sep="\n\n")
        return
    file = Path(arguments[0])
    text = file.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = filled(text, name, part)
    file.write_text(text, encoding="utf-8")


def _parted(page: str, name: str) -> tuple[str, str, str]:
    """What stands before the content, with its mark, the content, and what stands behind."""
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the file needs one line {begin.strip()} and one line {end.strip()}")
    before, _, rest = page.partition(begin)
    inside, _, behind = rest.partition(end)
    return before + begin, inside, end + behind
