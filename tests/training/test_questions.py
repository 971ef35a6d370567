"""Which validation rows a replica is asked, in which microbatches, and what ends an answer."""

import json
from dataclasses import replace

import pytest
from image_units import image_units, unit_of

from loongplug.data.dataset import ChatDataset
from loongplug.data.processor_folder import load_processor
from loongplug.data.sample_order import StepSizes
from loongplug.data.source import LocalSource
from loongplug.training.answers import AskedRows, asking, end_tokens, questions_in

pytestmark = pytest.mark.quick

ROOM = 4


def dataset_of(rows, demo, *, seq_length=80):
    processor = load_processor(demo / "processor")
    return ChatDataset(rows, processor=processor, seq_length=seq_length, training_phase="sft")


def test_replicas_share_the_first_rows_and_are_asked_equally_often(demo):
    dataset = dataset_of(demo / "test.jsonl", demo)
    questions = questions_in(dataset, limit=5)
    plan, by_row = asking(questions, each=4, multiple=3), {each.row: each for each in questions}
    asked = []
    for dp_rank in (0, 1):
        source = LocalSource(
            AskedRows(dataset, questions, room=ROOM, seq_length=80),
            sizes=StepSizes.constant(plan.batch),
            micro_batch_size=2,
            parts={dp_rank: None},
            dp_size=2,
            seed=None,
            encoders=image_units(),
            evaluation=plan,
        )
        first, second = list(source.next_step()), list(source.next_step())
        assert [each.number for each in first] == [0, 1, 2]
        for one, other in zip(first, second, strict=True):
            ids = [[each.input_ids.tolist() for each in x.samples] for x in (one, other)]
            assert ids[0] == ids[1]
        slots = plan.slots(micro_batch_size=2, dp_ranks=(dp_rank,), dp_size=2)
        own = [by_row[row] for _ in first for row in next(slots).rows]
        samples = [sample for each in first for sample in each.samples]
        assert [len(sample) for sample in samples[len(own) :]] == [0] * (6 - len(own))
        for sample, question in zip(samples, own, strict=False):
            assert sample.input_ids[:-ROOM].tolist() == question.input_ids.tolist()
            assert sample.position_ids.shape == (3, len(sample))
            steps = sample.position_ids[:, -ROOM:] - sample.position_ids[:, -ROOM - 1 : -1]
            assert (steps == 1).all()  # text goes on behind the question
            assert not sample.loss_mask.any()
        unit = unit_of(first[0])
        (share,) = unit.shares
        assert share.load().rows.shape[0] == unit.media.rows > 0
        asked.append([question.where for question in own])
    assert [len(each) for each in asked] == [3, 2]
    assert sorted(asked[0] + asked[1]) == sorted(question.where for question in questions)


def test_rows_that_cannot_be_asked_are_named(demo, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "Why?"}]}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the last message is the user's"):
        questions_in(dataset_of(rows, demo), limit=2)
    long = [
        {"role": "user", "content": "Why? " * 100},
        {"role": "assistant", "content": "."},
    ]
    rows.write_text(json.dumps({"messages": long}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .* but --seq-length is 80"):
        questions_in(dataset_of(rows, demo), limit=2)


def test_an_answer_ends_as_the_export_s_does(demo, tmp_path):
    processor = replace(load_processor(demo / "processor"), folder=tmp_path)
    assert end_tokens(processor) == {processor.end_token_id}
    for given, expected in ((7, {7}), ([7, 8], {7, 8}), (None, {processor.end_token_id})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
        assert end_tokens(processor) == expected
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"generation_config.json cannot be read"):
        end_tokens(processor)
