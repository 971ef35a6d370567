"""The start of a run looks at the checkpoint that it will load; the first rank, for all."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import write_checkpoint

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.training.checkpoints import check_source_folders, refuse_others_checkpoints

pytestmark = pytest.mark.quick


def given(folder: Path, **changes: Any) -> Namespace:
    options: dict[str, Any] = {"load": str(folder), "save": None, "ckpt_step": None, "rank": 0}
    options["finetune"] = False
    return Namespace(**options | changes)


def test_a_damaged_checkpoint_ends_the_run_at_its_start(tmp_path):
    for name in ("iter_0000002", "iter_0000004"):
        write_checkpoint(tmp_path, name)
    (tmp_path / TRACKER).write_text("4")
    check_source_folders(given(tmp_path), {})
    (tmp_path / "iter_0000004" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match=r"__0_0\.distcp ends after 0 of .*are: iter_0000002;"):
        check_source_folders(given(tmp_path), {})
    check_source_folders(given(tmp_path, ckpt_step=2), {})
    # The others hear of it: none of them reads what describes a large model once more.
    check_source_folders(given(tmp_path, rank=1), {})


def test_a_folder_without_a_checkpoint_is_where_a_run_begins(tmp_path):
    check_source_folders(given(tmp_path), {})


@pytest.mark.parametrize(
    ("name", "text"), [("iter_0000000", "0"), ("iter_0000120", "120"), ("release", "release")]
)
def test_a_lost_tracker_names_the_newest_checkpoint_again(tmp_path, name, text):
    write_checkpoint(tmp_path, name)
    refuse_others_checkpoints(given(tmp_path, save=str(tmp_path)))
    assert (tmp_path / TRACKER).read_text() == text
    check_source_folders(given(tmp_path), {})
    cure = r"Give another folder\. Training can also go on from them: --load "
    with pytest.raises(ValueError, match=cure):  # right for a conversion, too
        refuse_others_checkpoints(given(tmp_path, load=None, save=str(tmp_path)))
