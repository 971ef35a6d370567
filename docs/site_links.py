"""For the site of the documentation: links into the source tree lead nowhere there, and go."""

import re
from typing import Any

_INTO_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!README|CHANGELOG)[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    return _INTO_SOURCE.sub(r"\1", markdown)
