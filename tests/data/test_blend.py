"""Several files as one: what the flags may say, and which row comes when."""

from collections import Counter
from pathlib import Path

import pytest

from loongplug.data.blend import Blend, BlendSpec, open_rows, parse_blend
from loongplug.data.data_options import RowAccess
from loongplug.data.row_files import JsonlIndex

pytestmark = pytest.mark.quick


def write(folder: Path, name: str, rows: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(f'{{"text": "{name[0]}{i}"}}\n' for i in range(rows)))
    return path


@pytest.mark.parametrize(
    ("values", "paths", "weights"),
    [
        (["a"], "a", None),
        (["a", "b", "c"], "abc", None),
        (["1", "a"], "a", (1.0,)),
        (["0.3", "a", "7e-1", "b"], "ab", (0.3, 0.7)),
    ],
)
def test_megatrons_way_of_writing(values, paths, weights):
    expected = BlendSpec(tuple(Path(name) for name in paths), weights)
    assert parse_blend(values, flag="--data-path") == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1", "a", "b"], r"--data-path 1 a b: expected files \(p1 p2\), or a weight before each"),
        (["a", "1"], "a weight before each"),
        (["1", "a", "b", "c"], "a weight before each"),
        (["1", "2"], "a weight before each"),
        (["1"], "a weight before each"),
        (["0", "a", "1", "b"], "weight 0 is not above 0"),
        (["-1", "a"], "weight -1 is not above 0"),
        (["nan", "a"], "weight nan is not above 0"),
        (["inf", "a"], "weight inf is not above 0"),
    ],
)
def test_other_ways_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        parse_blend(values, flag="--data-path")


def test_a_folder_without_data_is_said_to_be_one(tmp_path):
    with pytest.raises(ValueError, match=r"^Folder .* has no data: .* energon prepare writes\.$"):
        open_rows([str(tmp_path)], flag="--train-data-path", seed=0)


def test_a_file_may_be_called_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, "7", 1).parent)
    assert parse_blend(["7"], flag="--data-path").paths == (Path("7"),)


def texts(rows: Blend) -> list[str]:
    return [rows.read(index)["text"] for index in range(len(rows))]


def blend(folder: Path, *sizes: int, weights: list[float] | None = None, seed: int = 1) -> Blend:
    sources = [JsonlIndex(write(folder, f"{'abc'[i]}.jsonl", n)) for i, n in enumerate(sizes)]
    return Blend(sources, weights=weights, seed=seed)


@pytest.mark.parametrize("weight", ["1e-9", "1e-320", "5e-324"])
def test_a_weight_so_small_that_the_others_never_end_is_refused(weight, tmp_path):
    few, many = write(tmp_path, "few.jsonl", 3), write(tmp_path, "many.jsonl", 5)
    with pytest.raises(ValueError, match=rf"^--data-path {weight} .*is too small: .* 3 rows"):
        open_rows([weight, str(few), "1", str(many)], flag="--data-path", seed=1)
    assert len(open_rows(["1e-3", str(few), "1", str(many)], flag="--data-path", seed=1)) == 3003


def test_without_weights_every_row_comes_once_evenly_mixed(tmp_path):
    assert texts(blend(tmp_path, 2, 4)) == ["b0", "a0", "b1", "b2", "a1", "b3"]


def test_weights_are_the_shares_and_no_row_is_left_out(tmp_path):
    rows = blend(tmp_path, 30, 7, 10, weights=[3, 2, 1])
    seen = texts(rows)
    shares = Counter(text[0] for text in seen)
    assert shares == {"a": 30, "b": 20, "c": 10}
    times = Counter(seen)
    assert {text: n for text, n in times.items() if text[0] != "b"} == dict.fromkeys(
        [f"a{i}" for i in range(30)] + [f"c{i}" for i in range(10)], 1
    )
    assert sorted(n for text, n in times.items() if text[0] == "b") == [2, 3, 3, 3, 3, 3, 3]
    for start in range(0, 60, 12):  # evenly mixed all along
        part = Counter(text[0] for text in seen[start : start + 12])
        assert all(abs(part[name] - 12 * share / 60) <= 1 for name, share in shares.items())


def divided(*values: str, share: float, seed: int = 1) -> tuple[list[str], list[str]]:
    """The texts of the rows to train on, and of those that are held out."""
    train, valid = (
        open_rows(values, flag="--data-path", seed=seed, valid_share=share, valid=valid)
        for valid in (False, True)
    )
    assert isinstance(train, Blend)
    assert isinstance(valid, Blend)
    return texts(train), texts(valid)


def test_a_share_of_each_file_is_held_out_and_never_trained_on(tmp_path):
    """By seed and number of a row, whatever stands beside it, and each once whatever its weight."""
    many, few = (
        str(write(tmp_path, f"{name}.jsonl", n)) for name, n in (("many", 200), ("few", 50))
    )
    train, valid = divided(many, few, share=0.2)
    everything = [f"m{i}" for i in range(200)] + [f"f{i}" for i in range(50)]
    assert sorted(train + valid) == sorted(everything)
    of_file = Counter(text[0] for text in valid)
    assert 25 <= of_file["m"] <= 55
    assert 4 <= of_file["f"] <= 16
    for values in ((few, many), ("9", many, "1", few)):
        again, held_out = divided(*values, share=0.2)
        assert sorted(held_out) == sorted(valid)
        assert set(again) == set(train)
    assert len(again) > len(train)  # rows of the heavier file come again
    alone = divided(many, share=0.2)
    assert alone[1] == [text for text in everything if text in valid and text[0] == "m"]
    assert alone[0] == [text for text in everything if text in train and text[0] == "m"]
    assert {*alone[1]} < {*divided(many, share=0.3)[1]}
    assert divided(many, share=0.2, seed=2)[1] != alone[1]
    write(tmp_path, "many.jsonl", 300)
    assert divided(many, share=0.2)[1][: len(alone[1])] == alone[1]


def test_a_share_that_leaves_nothing_is_refused(tmp_path):
    one, two = (str(write(tmp_path, f"{name}.jsonl", n)) for name, n in (("a", 1), ("b", 90)))
    for share, valid, message in (
        (1e-9, True, r"1e-09 takes no row of 1 \+ 90: give another share"),
        (-1, True, "takes no row"),
        (1.0, False, "1 leaves no row to train on of 1"),
        (0.999, False, "leaves no row to train on"),
    ):
        with pytest.raises(ValueError, match=f"^--data-path .*--valid-share .*{message}"):
            open_rows([one, two], flag="--data-path", seed=1, valid_share=share, valid=valid)


def test_the_order_follows_from_the_seed(tmp_path):
    first = texts(blend(tmp_path, 9, 7, weights=[3, 1], seed=1))
    assert first == texts(blend(tmp_path, 9, 7, weights=[3, 1], seed=1))
    others = [texts(blend(tmp_path, 9, 7, weights=[3, 1], seed=seed)) for seed in range(2, 6)]
    assert any(other != first for other in others)


def test_rows_know_their_file_and_their_media_root(tmp_path):
    one, two = write(tmp_path / "x", "a.jsonl", 1), write(tmp_path / "y", "b.jsonl", 2)
    rows = open_rows([str(one), str(two)], flag="--data-path", seed=1)
    assert [rows.where(i) for i in range(3)] == [f"{two}:1", f"{one}:1", f"{two}:2"]
    assert [rows.media_root(i) for i in range(3)] == [tmp_path / n for n in "yxy"]
    rows = open_rows(
        [str(one), str(two)], flag="--data-path", seed=1, access=RowAccess(media_root="/media")
    )
    assert {rows.media_root(i) for i in range(3)} == {Path("/media")}


def test_one_file_is_itself(tmp_path):
    path = write(tmp_path, "a.jsonl", 3)
    for values in ([str(path)], ["0.5", str(path)]):
        rows = open_rows(values, flag="--data-path", seed=1)
        assert isinstance(rows, JsonlIndex)
        assert len(rows) == 3
