"""Where the device cannot be built, one sentence says why."""

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from stand_in import extension


def test_a_torch_with_another_interface() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "source"
        folder.mkdir()
        (folder / "stand_in.cpp").write_text("int devices() { return stand_in::DEVICES; }\n")
        with (
            patch.object(extension, "SOURCE", folder),
            patch.dict("os.environ", XDG_CACHE_HOME=name),
            pytest.raises(extension.UnknownTorchError) as raised,
        ):
            extension.build()
    said = str(raised.value)
    assert "most likely torch" in said
    assert "stand_in.cpp:1:24: error: " in said


def test_a_machine_without_a_compiler() -> None:
    assert extension.reason_without() is None
    with patch.object(extension.shutil, "which", return_value=None):
        assert "by a C++ compiler (g++), and none is here" in str(extension.reason_without())
