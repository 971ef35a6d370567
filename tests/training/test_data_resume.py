"""Going on in the data: other data are refused, other layouts and workers see the same samples."""

import json
import shutil
from collections.abc import Sequence

import pytest
from layout_flags import PP2
from ranks import RankError, run_ranks
from surveyed import settings_of

from loongplug.data.blend import open_rows
from loongplug.data.check import index
from loongplug.data.data_options import RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.processor_folder import load_processor
from loongplug.training.run import run

PADDING = 0


def seen(rank: int, *, flags: list[str]) -> list[list[int]]:
    """The token ids of every row that this rank trains on, without padding, step by step."""
    rows: list[list[int]] = []
    original = MicrobatchLoader.__next__

    def next_microbatch(self: MicrobatchLoader):
        microbatch = original(self)
        if microbatch.input_ids is not None:  # the first stage has them
            for row in microbatch.input_ids.tolist():
                while row[-1] == PADDING:
                    row.pop()
                rows.append(row)
        return microbatch

    MicrobatchLoader.__next__ = next_microbatch
    try:
        run(flags)
    except SystemExit as ended:
        if ended.code:
            raise
    return rows


def stream(flags: list[str], *more: str, ranks: int, micro: int) -> list[list[int]]:
    """The rows of all data parallel ranks in the order of the stream."""
    found = run_ranks(
        seen, ranks, flags=[*flags, "--micro-batch-size", str(micro), *more], timeout=120.0
    )
    return [
        row
        for start in range(0, len(found[0]), micro)
        for rank in found
        for row in rank[start : start + micro]
    ]


@pytest.mark.slow
def test_the_stream_goes_on_with_other_ranks_and_microbatches(flags, demo, tmp_path):
    """4 steps of 24, so that the second epoch begins in the third; no row is one of validation."""
    data = str(demo / "train.jsonl")
    rows = open_rows([data], flag="--train-data-path", seed=1234, valid_share=0.2)
    assert 48 < len(rows) < 64
    samples = ChatDataset(
        rows, processor=load_processor(demo / "processor"), seq_length=80, training_phase="sft"
    )
    flags = [*flags, "--global-batch-size", "24", "--use-distributed-optimizer"]
    flags += ["--valid-share", "0.2", "--eval-iters", "0"]
    whole = stream(flags, ranks=1, micro=8)
    assert len(whole) == 96
    epoch = [samples[row].input_ids.tolist() for row in range(len(rows))]
    assert sorted(whole[: len(rows)]) == sorted(epoch)
    assert all(row in epoch for row in whole)
    save = ("--save", str(tmp_path))
    first = stream(flags, *save, "--exit-interval", "1", ranks=3, micro=2)
    assert first == whole[:24]
    second = stream(flags, *save, "--load", str(tmp_path), "--exit-interval", "3", ranks=1, micro=3)
    assert second == whole[24:72]
    assert stream(flags, *save, "--load", str(tmp_path), ranks=2, micro=4) == whole[72:]


@pytest.mark.slow
def test_changed_data_are_refused_on_every_rank(flags, demo, tmp_path):
    # Beside the demo's file, so that images are found.
    data = demo / "some.jsonl"
    data.write_text((demo / "train.jsonl").read_text())
    common = (*PP2, "--train-data-path", str(data), "--save", str(tmp_path / "run"))
    run_ranks(seen, 2, flags=[*flags, *common, "--exit-interval", "2"], timeout=120.0)
    again = [*flags, *common, "--load", str(tmp_path / "run")]
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(RankError, match="rows file 1 digest was") as raised:
        run_ranks(seen, 2, flags=again, timeout=120.0)
    assert len(raised.value.errors) == 2
    data.write_text("".join(lines))
    changed = "settings seed was 1234, is 7; settings valid_share was None, is 0.2"
    with pytest.raises(RankError, match=changed):
        run_ranks(seen, 2, flags=[*again, "--seed", "7", "--valid-share", "0.2"], timeout=120.0)
    again = [*again, "--seed", "7", "--finetune", "--save", str(tmp_path / "again")]
    assert len(run_ranks(seen, 2, flags=again, timeout=120.0)[0]) == 32


def seen_and_made(rank: int, *, flags: list[str]) -> tuple[list[list[int]], int]:
    """What the rank trains on, and of how many samples it makes the text parts for it."""
    asked: list[int] = []
    original = ChatDataset.text_parts

    def text_parts(self: ChatDataset, indices: Sequence[int]):
        asked.extend(indices)
        return original(self, indices)

    ChatDataset.text_parts = text_parts
    return seen(rank, flags=flags), len(asked)


@pytest.mark.slow
def test_with_an_index_each_rank_makes_its_own_half_of_the_same_packs(flags, demo, tmp_path, capfd):
    """Over an epoch; a run resumes with it where one without it was stopped.

    The template drops thoughts of earlier turns, of which a run tells.
    """
    processor = shutil.copytree(demo / "processor", tmp_path / "processor")
    template = processor / "chat_template.jinja"
    drops = "not loop.last and message.content is string"
    said = f"(message.content.split('</think>')[-1] if {drops} else message.content)"
    text = template.read_text()
    assert "'text': message.content" in text
    template.write_text(text.replace("'text': message.content", f"'text': {said}"))
    flags = [*flags, "--tokenizer-model", str(processor)]
    data = tmp_path / "rows.jsonl"
    rows = (demo / "train.jsonl").read_text().splitlines()
    masked = json.dumps(json.loads(rows[0]) | {"loss": False})
    data.write_text("".join(f'{{"origin": "demo", {row[1:]}\n' for row in (*rows, masked)))
    flags = [*flags, "--train-data-path", str(data), "--media-root", str(demo)]
    flags += ["--packing", "--packing-look-ahead", "8", "--micro-batch-size", "1"]
    flags += ["--use-distributed-optimizer"]
    save = ("--save", str(tmp_path / "run"), "--exit-interval", "2")

    def train(*more: str):
        return run_ranks(seen_and_made, 2, flags=[*flags, *more], timeout=120.0)

    without = train(*save)
    turns = "Earlier turns are rendered differently: --multi-turn split"
    said = capfd.readouterr().out
    assert f"{turns}.\n" in said
    assert f"saved       iteration 2 in {tmp_path / 'run'}\ngoing on " in said
    met = f"keys without a use (the first at {data}:"
    assert said.count(met) == 1  # as rows are met
    noted = json.loads((tmp_path / "run" / "loongplug_data.json").read_text())
    assert noted["settings"]["train_template_thought"] is False
    assert noted["settings"]["multi_turn"] == "split"
    index([str(data)], settings_of(processor, access=RowAccess(media_root=demo)), processes=1)
    at = flags.index("--train-iters")
    flags[at : at + 2] = ["--epochs", "1"]  # which are as many: the learning rate's course is one
    capfd.readouterr()
    keys = "keys without a use (rows that have them): 'origin'"
    whole = train()
    said = capfd.readouterr().out
    assert f"{turns}, 64 answers are trained on.\n" in said
    assert "; planned packs, about " in said
    assert f"Training data have {keys} ({len(rows)})." in said
    assert "Training data have 1 rows left out by loss or weight" in said
    assert said.count(keys) == 1
    assert met not in said
    rest = train("--load", str(tmp_path / "run"))
    for rank in range(2):
        assert without[rank][0] + rest[rank][0] == whole[rank][0]
    halves = [count for _, count in whole]
    assert 64 <= sum(halves) < 90
    assert max(halves) < 0.6 * sum(halves)
    data.write_text(data.read_text() + "\n")
    with pytest.raises(RankError, match=r"is of other rows or settings .*make it again"):
        train()


@pytest.mark.slow
def test_packs_go_on_from_the_checkpoint_s_place(flags, tmp_path):
    """In another layout, without making again the samples that were consumed."""
    packing = ("--packing", "--seq-length", "160", "--train-iters", "4")
    flags = [*flags, "--global-batch-size", "4", *packing]
    whole = stream(flags, ranks=1, micro=1)
    assert len(whole) == 16
    save = ("--save", str(tmp_path), "--use-distributed-optimizer")
    first = stream(flags, *save, "--exit-interval", "3", ranks=2, micro=1)
    assert first == whole[:12]
    assert stream(flags, *save, "--load", str(tmp_path), ranks=1, micro=1) == whole[12:]
    few = ("--packing-look-ahead", "8", "--seq-length", "80", "--save", str(tmp_path / "few"))
    few += ("--micro-batch-size", "1", "--global-batch-size", "8", "--save-interval", "3")
    goes_on = ("--load", str(tmp_path / "few"), "--ckpt-step", "3")
    all_of_them, rest = (
        run_ranks(seen_and_made, 1, flags=[*flags, *few, *more], timeout=120.0)[0][1]
        for more in ((), goes_on)
    )
    assert all_of_them > 50
    assert rest < all_of_them // 2
    resumed = [*flags, *save, "--load", str(tmp_path), "--micro-batch-size", "1"]
    resumed += ["--packing-look-ahead", "4"]
    with pytest.raises(RankError, match="settings packing_look_ahead was"):
        run_ranks(seen, 1, flags=resumed, timeout=120.0)
