"""How many communicators a rank has: as many as a run's start connects, and as others counted."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.estimate.ranks import as_rank
from loongplug.estimate.run_of_flags import parsed_for
from loongplug.hetero import bubbles, encoder_place
from loongplug.hetero.placement import Pair, count
from loongplug.parallel import exchange_groups
from loongplug.training.rules.streaming import communicators_of

pytestmark = pytest.mark.quick

RUN = [
    *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--seq-length", "256"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--train-iters", "1", "--lr", "1e-3"),
]
TP2_PP2 = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
FULL = ["--enable-full-hetero-dp"]
STREAMED = [*FULL, "--full-hetero-dp-schedule", "streamed", "--device", "cpu"]
VIRTUAL = ["--num-virtual-stages-per-pipeline-rank", "2"]
APART = ["model.image_encoder.rank_offset=4", "model.image_encoder.pipeline_model_parallel_size=2"]
# Ranks, and flags.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "streamed": (4, [*TP2_PP2, *STREAMED]),
    "streamed-virtual": (4, [*TP2_PP2, *STREAMED, *VIRTUAL]),
    "streamed-and-separated": (
        4,
        [*TP2_PP2, *STREAMED, "--model-name", "qwen2_5_omni_tiny"],
    ),
    "separated": (4, [*TP2_PP2, *FULL]),
    "hetero-dp": (4, [*TP2_PP2[:2], "--enable-encoder-hetero-dp"]),
    "apart": (6, [*TP2_PP2[:2], *APART]),
    "apart-sequence-parallel": (6, [*TP2_PP2[:2], "--sequence-parallel", *APART]),
}


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS.values(), ids=LAYOUTS)
def test_as_many_are_counted_as_a_start_connects(
    ranks: int, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[list[Pair]] = []
    all_to_all: list[Any] = []
    make = exchange_groups.create_exchange_group

    def connect(group: Any, pairs: Iterable[Pair], *, device: Any) -> None:
        if group is not None:
            connected.append([*pairs])

    def made(name: str, groups: Any, *, pairs: Any = None, **more: Any) -> Any:
        group = make(name, groups, pairs=pairs, **more)
        all_to_all.extend([] if pairs is not None or group is None else [group])
        return group

    monkeypatch.setattr(exchange_groups, "connect", connect)
    for module in (encoder_place, bubbles):
        monkeypatch.setattr(module, "create_exchange_group", made)
    parsed = parsed_for([*RUN, *flags], ranks=ranks, stand_ins=tmp_path)
    found = communicators_of(parsed.args, parsed.model)
    assert sorted(found) == [*range(ranks)]
    for rank in range(ranks):
        connected.clear()
        all_to_all.clear()
        with as_rank(parsed, rank) as here:
            for each in here.engine.encoders.values():
                assert each.place is not None
                if each.mode.fills_bubbles:
                    each.bubbles()
        assert found[rank].messages == count(connected)[rank], rank
        assert found[rank].exchanges == len(all_to_all), rank


def test_megatrons_groups_are_those_of_several_ranks(tmp_path: Path) -> None:
    """Of the decoder tp, pp, both and all; of the encoder dp and all; and the world."""
    parsed = parsed_for([*RUN, *TP2_PP2, *FULL], ranks=4, stand_ins=tmp_path)
    found = communicators_of(parsed.args, parsed.model)
    assert {each.megatrons for each in found.values()} == {4 + 2 + 1}
    assert {each.own for each in found.values()} == {1}


@pytest.mark.parametrize("device", [[], ["--device", "cpu"]], ids=["gpu", "cpu"])
def test_an_estimate_is_for_gpus_unless_flags_say_cpu(tmp_path: Path, device: list[str]) -> None:
    """On GPUs nothing streams that was not asked to, and there is NCCL."""
    flags = [*RUN, *TP2_PP2, *FULL, *device]
    parsed = parsed_for(flags, ranks=4, stand_ins=tmp_path)
    assert parsed.args.full_hetero_dp_schedule == ("streamed" if device else "separated")
    assert parsed.args.device == "cpu"
    options = ["--ranks", "4", "--visual-tokens", "16"]
    result = CliRunner().invoke(app, ["estimate", *options, *flags])
    assert result.exit_code == 0, result.output
    shown = [re.findall(r"[\w.]+", line) for line in result.output.splitlines()]
    counts = [line for line in shown if line[:3] == ["communicators", "of", "NCCL"]]
    assert counts == ([] if device else [["communicators", "of", "NCCL", "8", "8"]])
    assert ("not in the total; 160 MiB each" in result.output) == (not device)


def test_what_gpus_refuse_an_estimate_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    flags = [*RUN, *TP2_PP2, *STREAMED[:-2]]
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 and 4 streams"):
        parsed_for(flags, ranks=4, stand_ins=tmp_path)
