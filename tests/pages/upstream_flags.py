"""The flags of the installed Megatron-Core, as the wheel's file has them.

``PYTHONPATH=tests python -m pages.upstream_flags`` writes the file.
"""

import argparse
from collections.abc import Iterator
from importlib.metadata import version

from loongplug.platform import activate
from loongplug.platform.upstream_flags import FILE, KINDS, MANY
from loongplug.training.flags import own_parser, whole_parser

_TESTED = ("megatron-core", "torch")


def flag_lines() -> list[str]:
    """A line for each name of a flag that is not LoongPlug's own."""
    own = own_parser()._option_string_actions
    parser = whole_parser()._option_string_actions
    return sorted(_line(*each) for each in parser.items() if each[0] not in own)


def _line(flag: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return flag
    kind = next((name for name, each in KINDS.items() if each is action.type), "text")
    return f"{flag} {kind}{'' if action.nargs is None else MANY}"


def _content() -> Iterator[str]:
    versions = (f"{each}=={version(each).partition('+')[0]}" for each in _TESTED)
    yield f"# {' '.join(versions)}"
    yield from flag_lines()


if __name__ == "__main__":
    activate("cpu")
    FILE.write_text("\n".join(_content()) + "\n", encoding="utf-8")
