"""Parts of a page that a program fills, between two comments with the part's name."""


def filled(page: str, name: str, content: str) -> str:
    """``page``, a file's content, with ``content`` between the marks of ``name``.

    Raises:
        ValueError: the marks are not there once each.
    """
    before, _, behind = _parted(page, name)
    begin, end = marks(name)
    return f"{before}{begin}{content}{end}{behind}"


def content(page: str, name: str) -> str:
    """What stands between the marks of ``name``. Raises as :func:`filled` does."""
    return _parted(page, name)[1]


def marks(name: str) -> tuple[str, str]:
    """What stands before and behind a part on its page."""
    return f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"


def _parted(page: str, name: str) -> tuple[str, str, str]:
    begin, end = marks(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the file needs one line {begin.strip()} and one line {end.strip()}")
    before, _, rest = page.partition(begin)
    inside, _, behind = rest.partition(end)
    return before, inside, behind
