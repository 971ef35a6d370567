"""transformers for programs that read configs and rows alone: seconds faster without torch."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec

_HIDDEN = ("torch", "torchvision")
_SILENT = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # which say that there is no torch


@contextmanager
def transformers_without_torch() -> Iterator[None]:
    """Inside, transformers is imported as if there were no torch.

    That lasts for the rest of the process: only one may enter that ends, or becomes another,
    before it needs a model. Where torch or transformers is there already, nothing changes.
    """
    if {"torch", "transformers"} & {*sys.modules}:
        yield
        return
    find, silent = importlib.util.find_spec, os.environ.get(_SILENT, "")

    def find_others(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in _HIDDEN else find(name, package)

    importlib.util.find_spec, os.environ[_SILENT] = find_others, "1"
    try:
        yield
    finally:
        importlib.util.find_spec, os.environ[_SILENT] = find, silent
