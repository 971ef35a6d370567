"""Measurements of modes side by side: levels, pipeline and context of ``benchmarks/bench.py``.

Each prints a table and can write JSON, known by its keys. They run training as it is.
"""

from typing import Any

from loongplug.output_files import keys

LEVELS = keys("work rounds settings")
CONTEXT = keys("work rounds attention steps refused encoder_share activations")
_is_case = keys("case step empty work bubbles predicted over_busiest over_even")


def are_cases(found: Any) -> bool:
    """Whether it is what ``pipeline`` writes."""
    return isinstance(found, list) and all(map(_is_case, found))
