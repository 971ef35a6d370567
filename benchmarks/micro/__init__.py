"""Measurements of single parts, for those who work on them: ``python benchmarks/bench.py``.

Each file measures one thing, prints a table and can write JSON.
"""

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """This process's, in which a child finds these modules."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
