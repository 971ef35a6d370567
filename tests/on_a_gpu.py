"""What needs a GPU runs in an interpreter of its own: this one's platform is the CPU."""

import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parent


def in_fresh_interpreter(file: str, function: str, *, device: str = "cuda") -> None:
    """Call a function of a test file there, on the platform of ``device``."""
    path = Path(file)
    code = (
        f"import sys; sys.path[:0] = [{str(_TESTS)!r}, {str(path.parent)!r}]\n"
        f"from loongplug.platform import activate; activate({device!r})\n"
        f"import {path.stem}; {path.stem}.{function}()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
