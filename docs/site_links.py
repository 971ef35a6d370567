"""For the site of the documentation: links into the source tree go, and long names may break."""

import re
from typing import Any

_INTO_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!README|CHANGELOG)[^)]+\)")
_NAME_IN_A_CELL = re.compile(r"(?<=<code>)[^<]+(?=</code>)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page: links into the source tree lead nowhere on the site."""
    return _INTO_SOURCE.sub(r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML: a name in a table may break behind its parts."""
    return re.sub(r"<t[hd].*?</t[hd]>", lambda cell: _breakable(cell[0]), html, flags=re.DOTALL)


def _breakable(cell: str) -> str:
    return _NAME_IN_A_CELL.sub(lambda name: re.sub(r"[_/.=:|]", r"\g<0><wbr>", name[0]), cell)
