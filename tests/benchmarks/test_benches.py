"""Each command of ``benchmarks/bench.py`` in a small size: its figures, and how fast parts are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import bench
from micro import experts, memory
from micro.memory_counter import CountedCopies, StorageCounter
from micro.memory_plan import BOTH, FULL, NOTHING, PLAIN, TWICE, Work
from micro.packing import skewed_lengths
from micro.switch import measure
from micro.trace import bench_trace
from modes import context, levels
from modes.context_work import ContextWork, comparisons
from modes.levels_figures import phases
from modes.levels_work import APART, STREAMED, TUNED, UNIFORM, Setting
from modes.levels_work import FULL as SEPARATED
from modes.levels_work import Work as LevelsWork
from pace import times_slower
from PIL import ImageFile
from ranks import run_ranks
from typer.testing import CliRunner

from loongplug.data.packing import packs_once
from loongplug.estimate.live_bytes import Tape
from loongplug.observe.trace_file import TraceEvent
from loongplug.platform.prefetch import Copies


def written(command: str, folder: Path) -> dict[str, Any]:
    """What the command writes, in a process without a group of ranks of its own."""
    path = folder / "figures.json"
    result = CliRunner().invoke(bench, [*command.split(), "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def written_by_a_rank(command: str, folder: Path) -> dict[str, Any]:
    (found,) = run_ranks(lambda rank: written(command, folder), 1)
    return found


@pytest.mark.quick
def test_attention_holds_no_scores(tmp_path: Path) -> None:
    size = "--sequence-length 512 --heads 4 --head-dim 16 --rounds 2 --threads 1"
    figures = written(f"attention {size}", tmp_path)
    scores = 4 * 4 * 512 * 512  # float32 of every head: the unfused side has to hold them
    peaks = (figures[side]["peak_memory_bytes"] for side in ("sdpa", "unfused"))
    assert next(peaks) < scores < next(peaks)
    assert len(figures["sdpa"]["seconds"]) == len(figures["unfused"]["seconds"]) == 2


@pytest.mark.quick
def test_a_rank_with_an_index_makes_its_share(tmp_path: Path) -> None:
    figures = written("indexed --samples 64 --dp-size 8 --seq-length 128 --rounds 2", tmp_path)
    assert max(figures["indexed"]) < min(figures["without"])


def test_joined_units_have_the_gradients_of_single_ones(tmp_path: Path) -> None:
    figures = written_by_a_rank("joined --units 3 --side 4 --rounds 2", tmp_path)
    assert 0 < figures["apart"] < 1e-5  # another order of sums, and no other gradient


@pytest.mark.quick
def test_pixels_as_bytes_are_an_eighth(tmp_path: Path) -> None:
    figures = written("pixels --height 64 --width 96 --rounds 2", tmp_path)
    theirs, ours = figures["by_transformers"], figures["as_bytes"]
    assert theirs["nbytes"] == 8 * ours["nbytes"] == 24 * 1536 * 4


@pytest.mark.quick
def test_text_of_samples_is_made_by_headers_alone(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()[:40]]
    parts = [part for row in rows for part in row["messages"][0]["content"]]
    images = sum(part["type"] == "image" for part in parts)
    command = f"data {demo}/train.jsonl --tokenizer-model {demo}/processor --samples 40"

    def decoded(image: Any) -> None:
        raise AssertionError(f"{image} is decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    assert written(f"{command} --rounds 3", tmp_path)["media"] == images


def test_packing_is_fast_and_full(tmp_path: Path) -> None:
    lengths = skewed_lengths(100_000, seq_length=8192)

    def next_fit() -> None:
        """The least there is to do: packs filled in order, none of them looked at again."""
        room = 0
        for length in lengths:
            if length > room:
                room = 8192
            room -= length

    slower = times_slower(
        lambda: list(packs_once(lengths, seq_length=8192, look_ahead=256)), next_fit, turns=3
    )
    assert slower < 120  # measured: 43; looking at each of those held would be thousands
    figures = written("packing", tmp_path)
    assert figures["fill_rate"] > 0.98
    assert figures["padded_fill_rate"] < 0.2


@pytest.mark.quick
def test_a_switch_takes_some_copies_of_what_it_exchanges(tmp_path: Path) -> None:
    assert written_by_a_rank("switch --switches 2000", tmp_path)["switches"] == 2000

    def measured(rank: int) -> tuple[float, float]:
        """Of a switch to another state and to the same, how many times such a copy each takes."""
        from time import perf_counter_ns

        from megatron.core import parallel_state

        state, found = vars(parallel_state), []
        for _ in range(5):
            figures, copies = measure(switches=4000), []
            for _ in range(4000):
                start = perf_counter_ns()
                dict(state)
                copies.append((perf_counter_ns() - start) / 1e3)
            copy = sorted(copies)[len(copies) // 2]
            found.append((figures.switch.median / copy, figures.to_the_same.median / copy))
        return min(found)

    ((other, same),) = run_ranks(measured, 1)
    assert other < 18  # measured: 7
    assert same < other / 2


@pytest.mark.quick
class TestCounter:
    """The bytes that the bench of memory counts."""

    def test_views_once_freed_ones_not_saved_ones_until_their_backward(self) -> None:
        import torch

        before = torch.ones(1024)  # 4 KiB that are there already
        counter = StorageCounter()
        counter.begin()
        made = before * 2  # 4 KiB
        views = [made.view(32, 32), made[:10]]
        gone = made + 1  # 8 KiB
        del gone
        weight = torch.ones(1024, requires_grad=True)  # 8 KiB
        loss = (weight * 2).square().sum()  # its factor is saved: 12 KiB, and the product with it
        assert 12 * 1024 <= counter.tape.total <= 20 * 1024
        loss.backward()
        assert 16 * 1024 <= counter.end() <= 32 * 1024
        assert len(views) == 2

    def test_what_left_is_the_hosts(self) -> None:
        import torch

        counter, host = StorageCounter(), Tape(region="host")
        copies = CountedCopies(Copies(), host)
        counter.begin()
        made = torch.zeros(1024)
        away = copies.host_like(made)
        assert counter.end() == 4 * 1024
        assert host.most == away.untyped_storage().nbytes() == 4 * 1024


@pytest.mark.quick
def test_an_exchange_within_a_forward_is_no_forward() -> None:
    spans = (
        *(("step", 0, 100), ("forward", 0, 50), ("encoder_forward", 0, 20), ("exchange", 20, 30)),
        *(("collective", 20, 30), ("backward", 50, 80), ("wait", 80, 90), ("gradients", 90, 92)),
        ("optimizer", 92, 97),
    )
    events = [
        TraceEvent(phase=phase, name=phase, start=start, end=end, step=3, details={})
        for phase, start, end in spans
    ]
    forward = {"encoder forward": 20, "decoder forward": 20}
    backward = {"encoder backward": 0, "decoder backward": 30}
    others = {"exchange": 10, "waiting": 10, "optimizer": 7, "data": 0, "idle": 3}
    assert phases((0, 100), events) == forward | backward | others


@pytest.mark.quick
@pytest.mark.parametrize(
    ("level", "setting", "encoding", "took"),
    [
        (UNIFORM, Setting(name="PP2", pp=2), (0, 0), 9 * 30),
        (SEPARATED, Setting(name="PP2", pp=2), (40, 40), 40 + 9 * 30 + 80),
        # Rank 1 alone decodes behind the first microbatch's features and before its last gradient.
        (APART, Setting(name="PP2", pp=2), (0, 80), 10 + 8 * 30 + 20),
        (UNIFORM, Setting(name="TP2", tp=2), (40, 40), 8 * 30 + 40 + 80),
    ],
)
def test_a_level_by_the_clock_is_its_schedule(level, setting, encoding, took) -> None:
    """Of 8 microbatches, whose passes take 10 and 20 ms, with 1 and 5 ms beside them."""
    from modes.levels_clock import clock_ms

    decoding = {"decoder forward": 80, "decoder backward": 160, "data": 1, "optimizer": 5}
    phase_ms = [
        dict.fromkeys(phases((0, 0), []), 0.0)
        | {**decoding, "encoder forward": each, "encoder backward": 2 * each}
        for each in encoding
    ]
    assert clock_ms(level, setting, phase_ms, microbatches=8) == pytest.approx(took + 6)


@pytest.mark.slow
@pytest.mark.sweep
class TestWholeRuns:
    """Benches that train."""

    def test_attention_is_well_ahead_at_two_thousand_tokens(self, tmp_path: Path) -> None:
        # Measured: 4.8 to 5.2 times on 2 busy cores. Far below that, something has changed.
        figures = written("attention --rounds 3", tmp_path)
        assert figures["speedup"] >= 2

    def test_all_ways_of_experts_are_the_same_step(self) -> None:
        work = replace(experts.WORK, micro_batch_size=1, microbatches=2)
        assert experts.run(flags=(), steps=1, json_path=None, work=work).apart < 1e-5

    def test_each_way_holds_less_and_none_changes_a_loss(self) -> None:
        # As deep as it takes for what one layer holds to weigh little beside what all keep.
        deep = Work(layers=12, seq_length=128)
        rows = {row.name: row for row in memory.measure(deep, device="cpu")}
        assert memory.agree([*rows.values()])
        held = {name: row.device for name, row in rows.items()}
        assert held[FULL] < held[PLAIN] < held[NOTHING]
        assert held[BOTH] < held[TWICE] < held[NOTHING]
        assert held[BOTH] <= 1.1 * held[FULL]
        assert {name for name, row in rows.items() if row.host} == {"tensors offloaded", BOTH}

    def test_a_trace_is_of_the_same_training(self, flags: list[str]) -> None:
        cost = bench_trace(
            [*flags, "--pipeline-model-parallel-size", "2"],
            ranks=2,
            warmup=1,
            steps=2,
            rounds=1,
            json_path=None,
        )
        assert 20 < cost.events_per_step < 200
        assert cost.bytes_per_step > 50 * cost.events_per_step

    def test_context_parallel_sides_have_the_same_losses(self) -> None:
        tiny = ContextWork(
            length=512,
            pack_length=512,
            documents=3,
            layers=2,
            heads=4,
            dim=16,
            exact_length=96,
            packs=2,
            planned=1 << 14,
            image_decoder_layers=4,
            image_encoder_layers=3,
            image_encoder_size=32,
            image_microbatches=2,
            image_samples=1,
            steps=1,
        )
        figures = context.bench_context(rounds=1, json_path=None, work=tiny)
        assert figures.attention.error <= 2e-6
        assert figures.attention.wire == 1.0
        assert figures.attention.imbalance_lpt < figures.attention.imbalance_zigzag
        # Of so short a row, what does not depend on its length still counts.
        assert 0.4 < figures.activations < 0.6
        made = {each.name for each in figures.steps}
        assert made | set(figures.refused) == {each.name for each in comparisons(tiny)}
        assert all("full separation" in name for name in figures.refused)
        assert all(each.loss_difference < 1e-4 for each in figures.steps)

    def test_levels_have_the_same_losses(self, tmp_path: Path) -> None:
        work = LevelsWork(
            decoder_layers=4,
            encoder_layers=3,
            encoder_size=32,
            micro_batch_size=1,
            microbatches=2,
            warmup=1,
            steps=1,
        )
        (figures,) = levels.bench_levels(
            rounds=1,
            json_path=None,
            pictures=tmp_path,
            work=work,
            settings=(Setting(name="PP2", pp=2),),
        )
        names = [each.level for each in figures.levels]
        assert names == [UNIFORM, TUNED, SEPARATED, STREAMED, APART]
        assert all(each.traced.exchange_bytes > 0 for each in figures.levels[2:])
        for level in figures.levels:
            assert level.loss_difference < 1e-4
            assert (tmp_path / level.picture.split("/")[-1]).stat().st_size > 1000
            assert any(rank["encoder backward"] > 0 for rank in level.traced.phase_ms)
