"""``--eval-generate``: a run's own answers are those of ``loongplug eval``, and change nothing."""

import json

import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks
from safetensors.torch import load_file

from loongplug.data.processor import load_processor
from loongplug.evaluate.generation import generate_answers, load_model
from loongplug.evaluate.metrics import is_match
from loongplug.evaluate.questions import read_questions
from loongplug.training.answers import Answers
from loongplug.training.run import run

QUESTIONS = 5
TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


def losses_and_answers(rank: int, *, flags: list[str]):
    """Losses, this rank's place among the data parallel ones, texts of each evaluation."""
    original, found = Answers._answers, []

    def recorded(self, asked):
        answers = original(self, asked)
        texts = self._processor.tokenizer.batch_decode(answers, skip_special_tokens=True)
        found.append((parallel_state.get_data_parallel_rank(), texts))
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
        (
            (
                *("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"),
                *("--num-virtual-stages-per-pipeline-rank", "2"),
            ),
            4,
            2,
        ),
        ((*TP2_PP2, "--sequence-parallel", "--enable-full-hetero-dp"), 4, 1),
        (
            (
                *("--tensor-model-parallel-size", "2", "--enable-encoder-hetero-dp"),
                *("--packing", "--micro-batch-size", "1"),
            ),
            2,
            1,
        ),
    ],
    ids=["virtual-stages", "full-separation", "hetero-dp-packed"],
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
    """Losses and weights to the last bit, so random states and the order of the data too."""
    found = []
    for generates in (False, True):
        folder = tmp_path / str(generates)
        folder.mkdir()
        losses, _, _ = trained(
            evaluated,
            *("--pipeline-model-parallel-size", "2", "--enable-full-hetero-dp"),
            *("--hidden-dropout", "0.1"),
            ranks=2,
            folder=folder,
            generates=generates,
        )
        found.append((losses, load_file(folder / "hf" / "model.safetensors")))
    (losses, weights), (same_losses, same_weights) = found
    assert losses == same_losses
    assert weights.keys() == same_weights.keys()
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
