"""Optimizer state of the other kind is refused by its flag."""

from argparse import Namespace
from pathlib import Path

import pytest

from loongplug.checkpoint.same_state import check_optimizer

pytestmark = pytest.mark.quick


def run_args(distributed: bool, **more: bool) -> Namespace:
    given = {"no_load_optim": False, "finetune": False} | more
    return Namespace(use_distributed_optimizer=distributed, **given)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [(True, "with --use.*; give --use-dist"), (False, "without --use.*; drop --use-dist")],
)
def test_the_other_kind_is_refused(saved, expected):
    with pytest.raises(ValueError, match=expected):
        check_optimizer(run_args(saved), run_args(not saved), folder=Path("run/iter_0000001"))


@pytest.mark.parametrize(
    ("saved", "run"),
    [
        (run_args(True), run_args(True)),
        (run_args(True), run_args(False, no_load_optim=True)),
        (run_args(True), run_args(False, finetune=True)),
        (run_args(True, no_save_optim=True), run_args(False)),
        (Namespace(), run_args(True)),
        (None, run_args(False)),
    ],
)
def test_what_is_not_loaded_may_be_of_any_kind(saved, run):
    check_optimizer(saved, run, folder=Path("run/iter_0000001"))
