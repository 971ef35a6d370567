"""What fuzzed runs that have to be refused may end like, and what is done to their checkpoints."""

from dataclasses import replace

import pytest
from attempts import FAILED, WHOLE, Ending
from fuzzed_run import WrongEndError
from refused import require_nothing_written, require_refused

pytestmark = pytest.mark.quick

TOLD = "loongplug: error [rank 0]: --lr: 0.01 on rank 0; 0.02 on rank 1\n"
REFUSED = Ending(ways=[FAILED, FAILED], losses=[{}, {}], said=[TOLD, ""], fired=False)


def test_one_sentence_before_the_first_step_is_right():
    require_refused(REFUSED, "--lr", "rank 1")


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (replace(REFUSED, ways=[FAILED, WHOLE]), "ends as"),
        (replace(REFUSED, ways=[FAILED, "SIGKILL"]), "ends as"),
        (replace(REFUSED, losses=[{1: 2.0}, {}]), "takes steps"),
        (replace(REFUSED, said=["", ""]), "there are 0 messages"),
        (replace(REFUSED, said=[TOLD, TOLD]), "there are 2 messages"),
        (replace(REFUSED, said=[TOLD * 2, ""]), "there are 2 messages"),
        (replace(REFUSED, said=[TOLD.replace("--lr", "it"), ""]), r"not tell of \['--lr'\]"),
        (replace(REFUSED, said=[TOLD, "Traceback (most recent"]), "traceback"),
    ],
)
def test_another_end_is_wrong(ending, words):
    with pytest.raises(WrongEndError, match=words):
        require_refused(ending, "--lr", "rank 1")


@pytest.mark.parametrize("name", ["iter_0000002", "loongplug_data.json"])
def test_a_refused_run_that_writes_is_wrong(tmp_path, name):
    (tmp_path / "logs").mkdir()
    require_nothing_written(tmp_path, tmp_path / "elsewhere")
    (tmp_path / name).mkdir()
    with pytest.raises(WrongEndError, match=name):
        require_nothing_written(tmp_path)
