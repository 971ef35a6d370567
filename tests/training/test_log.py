"""Where Megatron's output goes while our own progress is shown."""

import logging
import tempfile
from argparse import Namespace

import pytest

from loongplug.training.log import megatron_output

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def say(*, rank: int, world_size: int = 2, save: str | None = None) -> None:
    args = Namespace(save=save, rank=rank, ranks=world_size)
    with megatron_output(args, without_save="log") as terminal:
        print(f"printed by {rank}")
        logging.getLogger("megatron.core").warning("logged by %d", rank)
        print("progress", file=terminal)


def test_without_save_ranks_have_logs_in_one_folder(tmp_path, capsys):
    for rank in (0, 1):
        say(rank=rank)
    (folder,) = tmp_path.glob("loongplug-*/*")
    assert capsys.readouterr() == ("progress\nprogress\n", "")
    for rank in (0, 1):
        text = (folder / f"rank_{rank}.log").read_text()
        assert text == f"printed by {rank}\nlogged by {rank}\n"
    assert folder.parent.stat().st_mode & 0o077 == 0


def test_with_save_they_are_there(tmp_path):
    say(rank=0, save=str(tmp_path / "run"))
    assert "printed by 0" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert not list(tmp_path.glob("loongplug-*"))


def test_a_folder_of_another_is_refused(tmp_path):
    say(rank=0)
    (folder,) = tmp_path.glob("loongplug-*")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"Megatron's log cannot be in .* give --save DIR"):
        say(rank=0)
