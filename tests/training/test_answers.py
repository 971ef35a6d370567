"""``--eval-generate``: a run's own answers are those of ``loongplug eval``, and change nothing."""

import json

import pytest
from compared_runs import exit_code
from layout_flags import TP2_PP2
from megatron.core import parallel_state
from ranks import run_ranks
from tensor_files import assert_same_weights

from loongplug.data.processor_folder import load_processor
from loongplug.evaluate.generation import generate_answers, load_model
from loongplug.evaluate.metrics import is_match
from loongplug.evaluate.questions import read_questions
from loongplug.training.answers import Answers
from loongplug.training.run import run

QUESTIONS = 3


def losses_and_answers(rank: int, *, flags: list[str]):
    """Losses, and of each evaluation this rank's replica, None if it encodes alone, and texts."""
    original, found = Answers._answers, []

    def recorded(self, asked):
        answers = original(self, asked)
        texts = self._processor.tokenizer.batch_decode(answers, skip_special_tokens=True)
        replica = parallel_state.get_data_parallel_rank() if asked.questions else None
        found.append((replica, texts))
        return answers

    Answers._answers = recorded
    return [step.loss for step in run(flags)], found


@pytest.fixture(scope="module")
def evaluated(flags, demo):
    return [
        *(*flags, "--use-distributed-optimizer", "--valid-data-path", str(demo / "test.jsonl")),
        *("--eval-iters", "1", "--eval-interval", "4"),
    ]


def trained(flags, *layout, ranks, folder, generates=True):
    """Losses, the texts of the last evaluation by replica, metrics, and the log's lines."""
    more = [*layout, "--save-hf", str(folder / "hf"), "--metrics-json", str(folder / "m.json")]
    if generates:
        more += ["--eval-generate", str(QUESTIONS)]
    every = run_ranks(losses_and_answers, ranks, flags=[*flags, *more], timeout=480.0)
    last = dict(found[-1] for _, found in every if found)
    last.pop(None, None)
    assert all(len(found) == generates for _, found in every)  # the last one once
    return every[0][0], last, json.loads((folder / "m.json").read_text())


def said_by_eval(folder, data):
    processor = load_processor(folder)
    questions = read_questions(data, processor, limit=QUESTIONS)
    return questions, generate_answers(
        load_model(folder, device="cpu"),
        processor,
        questions=questions,
        batch_size=QUESTIONS,
        max_new_tokens=32,
        on_done=lambda count: None,
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "replicas"),
    [
        pytest.param(
            (
                *("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"),
                *("--num-virtual-stages-per-pipeline-rank", "2"),
            ),
            4,
            2,
            id="virtual-stages",
        ),
        pytest.param(
            (
                *(*TP2_PP2, "--sequence-parallel", "--enable-full-hetero-dp"),
                *("--use-vit-dp-balance", "--full-hetero-dp-cpu-offload"),
            ),
            4,
            1,
            id="full-separation",
        ),
        pytest.param(
            (
                *("--context-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
                *("--packing", "--cp-balance", "lpt", "--micro-batch-size", "1"),
            ),
            4,
            1,
            id="parts-of-rows",
        ),
        pytest.param(
            (
                *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
                *("--eval-micro-batch-size", "1", "model.image_encoder.rank_offset=2"),
                "model.image_encoder.data_parallel_size=2",
            ),
            4,
            1,
            id="own-ranks",
        ),
        pytest.param(
            (
                *("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"),
                *("--num-virtual-stages-per-pipeline-rank", "2"),
                "model.image_encoder.rank_offset=2",
                "model.image_encoder.pipeline_model_parallel_size=2",
            ),
            4,
            1,
            id="own-ranks-virtual-stages",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_answers_are_those_of_eval_on_the_exported_weights(
    evaluated, demo, tmp_path, layout, ranks, replicas
):
    _, answers, metrics = trained(evaluated, *layout, ranks=ranks, folder=tmp_path)
    questions, expected = said_by_eval(tmp_path / "hf", demo / "test.jsonl")
    assert answers == {rank: expected[rank::replicas] for rank in range(replicas)}
    assert any(expected)
    right = [is_match(text, each.answer) for text, each in zip(expected, questions, strict=True)]
    assert metrics["valid_exact_match"] == sum(right) / QUESTIONS


def test_training_s_numbers_are_those_without(evaluated, tmp_path):
    """To the last bit, with a resume behind an evaluation: losses and weights.

    So random states and the order of the data too.
    """
    layout = [
        *("--pipeline-model-parallel-size", "2", "--enable-full-hetero-dp"),
        *("--hidden-dropout", "0.1", "--eval-interval", "2"),
    ]
    whole, answering = tmp_path / "whole", tmp_path / "answering"
    whole.mkdir()
    answering.mkdir()
    losses, _, _ = trained(evaluated, *layout, ranks=2, folder=whole, generates=False)
    layout += ["--save", str(answering / "save")]
    stop = [*evaluated, *layout, "--eval-generate", str(QUESTIONS), "--exit-interval", "2"]
    assert run_ranks(exit_code, 2, flags=stop, timeout=480.0) == [0, 0]
    load = ["--load", str(answering / "save")]
    resumed, _, _ = trained(evaluated, *layout, *load, ranks=2, folder=answering)
    assert resumed == losses[2:]
    assert_same_weights(whole / "hf", answering / "hf")
