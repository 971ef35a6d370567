"""What a run shows, in a pipe and on a terminal, as ``docs/configuration.md`` has it.

``PYTHONPATH=tests python -m pages.shown`` runs the page's command twice, prints the one and draws
the other.
"""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from pages.commands import ROOT, blocks

PAGE, PICTURE = ROOT / "docs" / "configuration.md", ROOT / "docs" / "run_shown.svg"
_WIDTH = 150  # columns of the picture


def command() -> str:
    """The page's block that makes data and trains."""
    (found,) = (each.text for each in blocks(PAGE.read_text()) if "runs/lora" in each.text)
    return found


def _run(*, terminal: bool) -> str:
    """What the page's commands print, in a folder of their own."""
    with TemporaryDirectory() as folder:
        Path(folder, "scripts").symlink_to(ROOT / "scripts")
        own, theirs = pty.openpty() if terminal else os.pipe()
        bin_, width = Path(sys.executable).parent, str(_WIDTH)
        path = {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "COLUMNS": width}
        environment = {**os.environ, **path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        bash = ["bash", "-ec", command()]
        with subprocess.Popen(bash, cwd=folder, env=environment, stdout=theirs) as run:
            os.close(theirs)
            shown = b""
            try:
                while part := os.read(own, 2**16):
                    shown += part
            except OSError:  # a terminal whose other end is closed
                pass
        os.close(own)
        assert run.returncode == 0
    return shown.decode()


def _drawn(shown: str) -> str:
    """A picture of a terminal at the end of a run: of a line that was drawn again, the last."""
    plain = re.sub(r"\x1b\[\?25[hl]", "", shown).replace("\r\n", "\n")
    lines = [line.rpartition("\x1b[2K")[2].rstrip("\r") for line in plain.split("\n")]
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_terminal=True)
    (begin,) = (at for at, line in enumerate(lines) if line.startswith("\x1b[1mmodel "))
    for line in lines[begin:]:  # what makes the data comes before
        console.print(Text.from_ansi(line))
    # No fonts from elsewhere: a page that is read asks nobody.
    form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="loongplug train", code_format=form, unique_id="run")


def main() -> None:
    """Print what a pipe gets, and draw what a terminal shows."""
    print(_run(terminal=False), end="")
    PICTURE.write_text(_drawn(_run(terminal=True)), encoding="utf-8")


if __name__ == "__main__":
    main()
