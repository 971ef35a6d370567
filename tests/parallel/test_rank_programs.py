"""Our modules in torchrun's command line."""

from pathlib import Path

import pytest
from torch.distributed.run import parse_args

import loongplug
from loongplug.parallel.rank_programs import program_of, ranks_command

pytestmark = pytest.mark.quick

FOLDER = Path(loongplug.__file__).parent
STANDALONE = ("--standalone", "--nproc_per_node", "4")


@pytest.mark.parametrize(
    ("named", "path"),
    [
        (("-m", "loongplug.train"), "train.py"),
        ((str(FOLDER / "train.py"),), "train.py"),
        (("-m", "loongplug.convert.worker"), "convert/worker.py"),
        (("-m", "loongplug.bench.step"), "bench/step.py"),
    ],
)
def test_ours_is_found_by_name_and_by_path(named: tuple[str, ...], path: str) -> None:
    flags = ["--device=cpu", "--save", "-m", "--load", "loongplug.train"]
    found = program_of([*STANDALONE, *named, *flags])
    assert found is not None
    assert (found.launcher, found.path) == ([*STANDALONE], str(FOLDER / path))
    assert found.flags == flags


def test_others_are_left_to_torchrun(tmp_path: Path) -> None:
    assert program_of([*STANDALONE, str(tmp_path / "train.py")]) is None
    assert program_of([*STANDALONE, "-m", "micro.convert_worker"]) is None


@pytest.mark.parametrize(
    ("launcher", "flags", "forked"),
    [
        (STANDALONE, ("--device", "cpu"), True),
        (STANDALONE, ("--device=cuda", "--device", "cpu"), True),
        (STANDALONE, ("--device", "cpu", "--device=cuda"), False),
        (STANDALONE, (), False),
        (STANDALONE, ("--device", "tpu"), False),
        (("--nnodes", "2"), ("--device", "cpu"), False),
    ],
)
def test_ranks_are_forked_on_the_cpus_of_one_machine(
    launcher: tuple[str, ...], flags: tuple[str, ...], forked: bool
) -> None:
    found = program_of([*launcher, "-m", "loongplug.train", *flags])
    assert found is not None
    assert found.can_be_forked is forked


def test_torchrun_takes_the_words_of_forked_ranks() -> None:
    found = program_of([*STANDALONE, "-m", "loongplug.train", "--device", "cpu", "a.b=c"])
    assert found is not None
    words = parse_args(found.forked())
    assert (words.start_method, words.run_path, words.module) == ("forkserver", True, False)
    assert (words.nproc_per_node, words.standalone) == ("4", True)
    assert words.training_script == str(FOLDER / "train.py")
    assert words.training_script_args == ["--device", "cpu", "a.b=c"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_needs_no_torchrun(ranks: int) -> None:
    _, _, _, *words = ranks_command("-m", "loongplug.train", ranks=ranks)
    found = program_of(words)
    assert found is not None
    assert found.alone is (ranks == 1)
