"""Media outside of the data's folder: allowed, and refused with --confine-media."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from image_units import media_batch
from typer.testing import CliRunner

from loongplug.commands.data import data as data_commands
from loongplug.data import media_files
from loongplug.data.blend import Rows, open_rows
from loongplug.data.data_options import RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_files import ConfinedFolder, decode_image, image_size, open_media_file
from loongplug.data.media_loader import UnitLoader
from loongplug.evaluate.questions import read_questions

pytestmark = pytest.mark.quick

WHERE = "rows.jsonl:4"
REFUSED = "and --confine-media takes only what lies in"


@pytest.fixture
def inside(tmp_path, write_image) -> Path:
    """A folder with a picture in it, and another one beside it whose name begins with its own."""
    folder, beside = tmp_path / "media", tmp_path / "media-of-others"
    (folder / "sub").mkdir(parents=True)
    beside.mkdir()
    shutil.copy(tmp_path / write_image("a.png", height=32, width=32), folder)
    shutil.move(tmp_path / write_image("secret.png", height=32, width=64), beside)
    (folder / "link.png").symlink_to(beside / "secret.png")
    (folder / "others").symlink_to("../media-of-others")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "sub" / "back.png").symlink_to("../a.png")
    (tmp_path / "link-to-media").symlink_to("media")
    return folder


def open_below(folder: Path) -> list[str]:
    """Files that this process has open there."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith(f"{folder}/")]


OUTSIDE = (
    "link.png",
    "others/secret.png",
    "../media-of-others/secret.png",
    "sub/../../media-of-others/secret.png",
    "{beside}/secret.png",
)


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_lies_outside_is_not_opened(inside, name):
    beside = inside.parent / "media-of-others"
    name = name.format(beside=beside)
    assert image_size(inside / name, where=WHERE) == (32, 64)  # without the flag
    file = ConfinedFolder(inside) / name
    for use in (image_size, decode_image):
        with pytest.raises(ValueError, match=REFUSED) as caught:
            use(file, where=WHERE)
        assert str(caught.value) == (
            f"{WHERE}: image {inside / name} cannot be opened: it is {beside}/secret.png,"
            f" {REFUSED} {inside}."
        )
    assert not open_below(inside.parent)


@pytest.mark.parametrize("folder", ["media", "link-to-media", "media/sub/.."])
def test_what_lies_inside_is_opened(inside, monkeypatch, folder):
    monkeypatch.chdir(inside.parent)
    names = ("a.png", "sub/back.png", "sub/../a.png", "../media/a.png", str(inside / "a.png"))
    for root in (Path(folder), inside.parent / folder):
        for name in names:
            assert decode_image(ConfinedFolder(root) / name, where=WHERE).size == (32, 32)
    monkeypatch.chdir(inside)
    assert decode_image(ConfinedFolder(Path()) / "a.png", where=WHERE).size == (32, 32)
    assert decode_image(ConfinedFolder(Path("/")) / str(inside / "a.png"), where=WHERE)


def test_a_link_that_is_changed_at_the_last_moment_leads_nowhere(inside, monkeypatch):
    file = ConfinedFolder(inside) / "sub/back.png"
    secret = inside.parent / "media-of-others" / "secret.png"
    opened = os.open

    def swapped(path: Any, *arguments: Any) -> int:
        (inside / "sub" / "back.png").unlink(missing_ok=True)
        (inside / "sub" / "back.png").symlink_to(secret)
        return opened(path, *arguments)

    with open_media_file(file) as found:
        assert found.read(4) == b"\x89PNG"
    monkeypatch.setattr(media_files.os, "open", swapped)
    with pytest.raises(OSError, match=REFUSED):
        open_media_file(file)


@pytest.fixture
def rows_file(write_rows, row, inside) -> Path:
    return write_rows(
        row("Read", "1", images=("a.png",)),
        row("Read", "1", images=("link.png",)),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "video", "video": ["a.png", "link.png"], "fps": 1.0},
                    ],
                },
                {"role": "assistant", "content": "1"},
            ]
        },
    )


def opened(path: Path, root: Path | None, *, confined: bool) -> Rows:
    return open_rows(
        [str(path)],
        flag="--data-path",
        seed=1,
        access=RowAccess(media_root=root, confine_media=confined),
    )


def test_a_sample_is_bad_as_one_without_its_file(processor, rows_file, inside):
    def samples(*, confined: bool) -> list[Any]:
        rows = opened(rows_file, inside, confined=confined)
        dataset = ChatDataset(rows, processor=processor, seq_length=80, training_phase="sft")
        return dataset.text_parts([0, 1, 2])

    free = samples(confined=False)
    assert [sample.bad is None for sample in free[:2]] == [True, True]
    confined = samples(confined=True)
    assert confined[0].bad is None
    for line, sample in enumerate(confined[1:], 2):
        assert sample.bad.kind == "media"
        assert sample.bad.message.startswith(f"{rows_file}:{line}: image {inside}/link.png cannot")
    # Pixels come later, in another process perhaps.
    (inside / "a.png").unlink()
    (inside / "a.png").symlink_to("../media-of-others/secret.png")
    rows = opened(rows_file, inside, confined=True)
    dataset = ChatDataset(rows, processor=processor, seq_length=80, training_phase="sft")
    loaded = UnitLoader(dataset)(media_batch([0], confined[:1]))
    assert REFUSED in loaded.bad[0].message


def test_commands_confine_as_well(processor_folder, processor, rows_file, inside, capsys):
    common = ["--tokenizer-model", str(processor_folder), "--media-root", str(inside)]
    for command in (["check", "--seq-length", "80", "--processes", "1"], ["inspect"]):
        for flags, refused in (([], False), (["--confine-media"], True)):
            shown = CliRunner().invoke(
                data_commands, [command[0], str(rows_file), *command[1:], *common, *flags]
            )
            assert (REFUSED in shown.stdout) is refused, shown.stdout
    read_questions(rows_file, processor, access=RowAccess(media_root=inside), limit=2)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: image .*{REFUSED}"):
        read_questions(
            rows_file, processor, access=RowAccess(media_root=inside, confine_media=True), limit=2
        )
