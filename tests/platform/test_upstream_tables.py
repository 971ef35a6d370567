"""What the training log's table tells, of which Megatron function."""

from types import SimpleNamespace

import pytest

from loongplug.platform.upstream_seams import training_log_table

pytestmark = pytest.mark.quick


def nothing(*told, **more):
    """A listener who does not care."""


def test_every_logged_iteration_is_told_after_megatron_has_logged_it():
    """With the rate that the step has used, which it moves on before anything is logged."""
    told = []
    logged = []

    def log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **more):
        assert not told
        logged.append((iteration, learning_rate, rest, more))
        return "kept"

    step, row, *_ = training_log_table(
        lambda iteration, losses, **known: told.append((iteration, losses, known)),
        on_evaluation=told.append,
        interval=1,
    ).rows
    groups = [{"lr": 0.01}, {"lr": 0.1, "default_config": True}]

    def train_step(forward, data, model, optimizer, schedule):
        groups[1]["lr"] = schedule

    step.wrapper(train_step)(None, None, None, SimpleNamespace(param_groups=groups), 0.05)
    given = (1.0, True, 0, 0.5, None)
    assert row.wrapper(log)({"lm loss": 1}, {}, 0.05, 7, *given, pg_collection=None) == "kept"
    assert told == [(7, {"lm loss": 1}, {"learning_rate": 0.1, "grad_norm": 0.5})]
    assert logged == [(7, 0.1, given, {"pg_collection": None, "is_first_iteration": False})]


@pytest.mark.parametrize(
    ("interval", "iteration", "kept"), [(1, 1, False), (5, 1, True), (5, 6, True), (5, 10, False)]
)
def test_what_an_interval_has_said_is_not_said_again(interval, iteration, kept):
    """Megatron keeps what it has summed up in the first iteration of a start for the next line."""
    _, row, *_ = training_log_table(nothing, on_evaluation=nothing, interval=interval).rows
    log = row.wrapper(lambda *rest, is_first_iteration: is_first_iteration)
    given = ({}, {}, 0.1, iteration, 1.0, True, 0, None)
    assert log(*given, is_first_iteration=True) is kept
    assert log(*given, is_first_iteration=False) is False


def test_every_finished_evaluation_is_told():
    told = []
    *_, row, _ = training_log_table(
        lambda iteration, losses: None, on_evaluation=told.append, interval=1
    ).rows
    assert row.wrapper(lambda step: ({"lm loss": step}, None, False))(3) == (
        {"lm loss": 3},
        None,
        False,
    )
    assert row.wrapper(lambda step: (None, None, True))(3) == (None, None, True)
    assert told == [{"lm loss": 3}]


def test_what_was_validated_at_the_last_iteration_is_not_validated_again():
    seen = []
    *_, row = training_log_table(nothing, on_evaluation=nothing, interval=1).rows
    evaluate = row.wrapper(lambda prefix, step, data, model, iteration: seen.append(prefix))
    for prefix, iteration in (
        ("iteration 2", 2),
        ("iteration 4", 4),
        ("iteration 4 on validation set", 4),
        ("iteration 4 on test set", 4),
        ("iteration 5 on validation set", 5),
    ):
        evaluate(prefix, None, None, None, iteration)
    assert seen == [
        *("iteration 2", "iteration 4", "iteration 4 on test set"),
        "iteration 5 on validation set",
    ]
