"""The commands of a page of the documentation, and a run of them."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FILE = re.compile(r"^\*\*`(?P<place>[^`\n]+)`\*\*\n\n```\w+\n(?P<text>.*?)^```$", re.M | re.S)
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n)?^```bash\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block of commands; with ``reason``, why it is not run."""

    text: str
    reason: str | None = None


def blocks(markdown: str) -> list[Block]:
    """The bash blocks of a page, in order."""
    return [Block(found["text"], found["reason"]) for found in _BLOCK.finditer(markdown)]


def section(markdown: str, title: str) -> str:
    """The part of a page below this heading of the second level, up to the next."""
    _, _, behind = markdown.partition(f"\n## {title}\n")
    return behind.partition("\n## ")[0]


def script(markdown: str) -> str:
    """The blocks that are run, as one script: a later block may use an earlier one's variables."""
    return "set -euo pipefail\n" + "\n".join(
        block.text for block in blocks(markdown) if block.reason is None
    )


def write_files(markdown: str, folder: Path) -> None:
    """Write the files that a page shows, each below its name in bold, into ``folder``."""
    for found in _FILE.finditer(markdown):
        file = folder / found["place"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found["text"], encoding="utf-8")


def run_page(page: Path, *, folder: Path, timeout: float) -> str:
    """Run the page's commands in ``folder``, as in the root of a clone; return what they print."""
    return run_script(
        page.read_text(encoding="utf-8"), folder=folder, timeout=timeout, of=page.name
    )


def run_script(markdown: str, *, folder: Path, timeout: float, of: str, then: str = "") -> str:
    """As :func:`run_page`, of a page's text or a part of it, which errors call ``of``.

    ``then`` are commands behind the page's.
    """
    for name in ("scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    write_files(markdown, folder)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        ["bash", "-c", script(markdown) + then],
        cwd=folder,
        env=environment,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise AssertionError(f"{of} ended with {ended.returncode}:\n{ended.stdout}")
    return ended.stdout
