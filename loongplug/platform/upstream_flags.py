"""The flags of the Megatron-Core that is tested, as a file has them: known without its import."""

import importlib.metadata
from argparse import ArgumentParser
from pathlib import Path

# Written by tests/pages/upstream_flags.py: the versions that are tested, then a flag a line.
FILE = Path(__file__).with_suffix(".txt")
# What a flag's values are; with MANY behind it, there are several.
KINDS: dict[str, type] = {"int": int, "float": float, "text": str}
MANY = "..."


def is_tested(*packages: str) -> bool:
    """Whether the installed versions of these packages are the tested ones."""
    found = (f"{each}=={importlib.metadata.version(each).partition('+')[0]}" for each in packages)
    try:
        return all(each in _lines()[0].split() for each in found)
    except importlib.metadata.PackageNotFoundError:
        return False


def add_upstream_flags(parser: ArgumentParser) -> None:
    """Add the flags of the tested Megatron-Core, without its defaults, choices and help."""
    for line in _lines()[1:]:
        flag, _, kind = line.partition(" ")
        if not kind:
            parser.add_argument(flag, action="store_true")
            continue
        nargs = "*" if kind.endswith(MANY) else None
        parser.add_argument(flag, type=KINDS[kind.removesuffix(MANY)], nargs=nargs)


def _lines() -> list[str]:
    return FILE.read_text(encoding="utf-8").splitlines()
