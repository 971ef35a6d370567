"""``benchmarks/bench.py memory``: what is counted, and what each way to hold less comes to."""

import pytest
import torch
from bench import bench
from micro.memory import agree, measure
from micro.memory_counter import CountedCopies, StorageCounter
from micro.memory_plan import BOTH, FULL, NOTHING, PLAIN, TWICE, Work, ways
from typer.testing import CliRunner

from loongplug.estimate.live_bytes import Tape
from loongplug.platform.copies import HostCopies

KIB = 1024
# As deep as it takes for what one layer holds to weigh little beside what all of them keep.
DEEP = Work(layers=12, seq_length=128)


@pytest.mark.quick
class TestCounter:
    def test_views_once_freed_ones_not_saved_ones_until_their_backward(self):
        before = torch.ones(KIB)  # 4 KiB that are there already
        counter = StorageCounter()
        counter.begin()
        made = before * 2  # 4 KiB
        views = [made.view(32, 32), made[:10]]
        gone = made + 1  # 8 KiB
        del gone
        weight = torch.ones(KIB, requires_grad=True)  # 8 KiB
        loss = (weight * 2).square().sum()  # its factor is saved: 12 KiB, and the product with it
        assert 12 * KIB <= counter.tape.total <= 20 * KIB
        loss.backward()
        most = counter.end()
        assert 16 * KIB <= most <= 32 * KIB
        assert len(views) == 2

    def test_storages_that_shrink_count_as_what_is_left(self):
        counter = StorageCounter()
        counter.begin()
        made = torch.zeros(4 * KIB)
        made.untyped_storage().resize_(0)
        other = torch.zeros(2 * KIB)
        assert counter.tape.total == other.untyped_storage().nbytes()
        assert counter.end() == 16 * KIB

    def test_what_left_is_the_hosts(self):
        counter, host = StorageCounter(), Tape(region="host")
        copies = CountedCopies(HostCopies(), host)
        counter.begin()
        made = torch.zeros(KIB)
        away = copies.host_like(made)
        assert counter.end() == 4 * KIB
        assert host.most == away.untyped_storage().nbytes() == 4 * KIB


@pytest.mark.quick
def test_ways_and_sizes():
    flags = ways()
    assert "--overlap-moe-expert-parallel-comm" not in (*flags[PLAIN], *flags[FULL])
    assert all("--overlap-moe-expert-parallel-comm" in flags[way] for way in (NOTHING, BOTH))
    assert set(flags[TWICE]) < set(flags[BOTH])
    wrong = CliRunner().invoke(bench, ["memory", "--layers", "3", "--stages", "2"])
    assert wrong.exit_code == 1
    assert "expected layers that divide over the 4 virtual stages" in wrong.output


@pytest.mark.slow
@pytest.mark.sweep  # whole runs of a bench
def test_each_way_holds_less_and_none_changes_a_loss(capsys):
    rows = {row.name: row for row in measure(DEEP, device="cpu")}
    assert agree([*rows.values()])
    assert len({loss for row in rows.values() for loss in row.ranks[0].losses}) == DEEP.steps
    held = {name: row.device for name, row in rows.items()}
    assert held[FULL] < held[PLAIN] < held[NOTHING]
    assert held[BOTH] < held[TWICE] < held[NOTHING]
    assert held[BOTH] <= 1.1 * held[FULL]
    assert {name for name, row in rows.items() if row.host} == {"tensors offloaded", BOTH}
