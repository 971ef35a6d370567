"""The note of the data beside checkpoints."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from loongplug.checkpoint.notes import DATA_FILE, check_data_note, write_note
from loongplug.training.arguments import settle_transparency

pytestmark = pytest.mark.quick

DATA = {
    "rows": {"file 1": {"bytes": 10, "digest": "aa"}},
    "settings": {"seed": 1, "weights": (0.5, 0.5)},
}


def changed(**settings: object) -> dict[str, object]:
    return {**DATA, "settings": {**DATA["settings"], **settings}}


def test_the_same_data_pass_and_others_are_named(tmp_path: Path) -> None:
    write_note(tmp_path / DATA_FILE, DATA)
    check_data_note(tmp_path, DATA)
    with pytest.raises(ValueError, match="settings seed was 1, is 2") as raised:
        check_data_note(tmp_path, changed(seed=2))
    assert "--finetune" in str(raised.value)
    assert str(tmp_path / DATA_FILE) in str(raised.value)
    with pytest.raises(ValueError, match="settings packing was absent, is True"):
        check_data_note(tmp_path, changed(packing=True))
    rows = {"file 1": {"bytes": 11, "digest": "bb"}, "file 2": {"bytes": 1, "digest": "cc"}}
    with pytest.raises(ValueError, match="rows file 1 bytes was 10, is 11") as raised:
        check_data_note(tmp_path, {**DATA, "rows": rows})
    assert "rows file 2 digest was absent, is cc" in str(raised.value)
    with pytest.raises(ValueError, match="and 2 more"):
        check_data_note(tmp_path, {"rows": rows, "settings": {"a": 1}})


def test_a_part_that_older_notes_lack_passes_once(tmp_path: Path) -> None:
    newer = {**DATA, "tokenizer": {"added_tokens.json": "aa"}}
    write_note(tmp_path / DATA_FILE, DATA)
    check_data_note(tmp_path, newer)
    write_note(tmp_path / DATA_FILE, newer)
    with pytest.raises(ValueError, match=r"tokenizer added_tokens.json was aa, is absent"):
        check_data_note(tmp_path, {**DATA, "tokenizer": {}})


def test_a_damaged_note_is_refused(tmp_path: Path) -> None:
    write_note(tmp_path / DATA_FILE, DATA)
    path = tmp_path / DATA_FILE
    path.write_text(json.dumps(DATA)[:-5])
    with pytest.raises(ValueError, match="is damaged"):
        check_data_note(tmp_path, DATA)
    path.write_bytes(b'{"\xff')
    with pytest.raises(ValueError, match="is damaged"):
        check_data_note(tmp_path, DATA)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"rows"', "{}", '{"name": "a package"}'])
def test_another_file_of_that_name_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / DATA_FILE
    path.write_text(content)
    with pytest.raises(
        ValueError, match=r"is not a note of LoongPlug.*rows, settings; remove it to"
    ):
        check_data_note(tmp_path, DATA)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="is not a file; remove it to go on"):
        check_data_note(tmp_path, DATA)


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    write_note(tmp_path / DATA_FILE, changed(seed="x" * 10_000))
    with pytest.raises(ValueError, match=r"settings seed was x{200}\.\.\., is 1"):
        check_data_note(tmp_path, DATA)


def test_a_run_that_goes_on_treats_transparency_as_it_did(tmp_path, capsys) -> None:
    def settled(folder: Path, *, rank: int = 0, **given: object) -> tuple[str, str]:
        options = {"transparency": None, "load": str(folder), "finetune": False, "rank": rank}
        args = Namespace(**{**options, **given})
        settle_transparency(args)
        return args.transparency, capsys.readouterr().out

    assert settled(tmp_path) == ("white", "")
    write_note(tmp_path / DATA_FILE, DATA)  # as before there was such a flag, and of runs that drop
    transparency, said = settled(tmp_path)
    assert transparency == "drop"
    assert said.count("\n") == 1
    assert f"{tmp_path} says nothing of transparency" in said
    assert settled(tmp_path, rank=1) == ("drop", "")
    assert settled(tmp_path, finetune=True) == ("white", "")
    assert settled(tmp_path, transparency="white") == ("white", "")
    with pytest.raises(ValueError, match="settings transparency was absent, is white"):
        check_data_note(tmp_path, changed(transparency="white"))
    write_note(tmp_path / DATA_FILE, changed(transparency="white"))
    assert settled(tmp_path) == ("white", "")
