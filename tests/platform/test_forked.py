"""What a forked process does first; that it helps is seen on the stand-in device's threads."""

import subprocess
import sys

import pytest


@pytest.mark.quick
def test_without_torch_there_is_nothing_to_do() -> None:
    code = (
        "import sys; from loongplug.platform.forked import own_thread_pool; own_thread_pool(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
