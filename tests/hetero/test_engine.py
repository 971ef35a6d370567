"""Several encoders around one schedule: their operations nest, each has its own gradients."""

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_step import (
    EARS,
    ENTRY,
    Model,
    executor_of,
    loss_of,
    microbatches,
    run_encoders,
)

from loongplug.hetero.engine import Engine
from loongplug.hetero.executor import Executor
from loongplug.hetero.modes import FULL_HETERO_DP, STREAMED
from loongplug.hetero.operations import BEGIN, END, forward, gradient
from loongplug.hetero.policies import group_ahead, separated
from loongplug.platform.prefetch import Copies

pytestmark = pytest.mark.quick

BOTH = (ENTRY, EARS)
ROWS, SOUNDS = [3, 5, 2, 4, 7], [4, 0, 6, 1, 2]
POLICIES = {"separated": separated, "group ahead": group_ahead}


def executors(*policies, copies=Copies, **options):
    return {
        entry.name: executor_of(policy, copies(), entry=entry, **options)
        for entry, policy in zip(BOTH, policies, strict=True)
    }


def in_each_forward(model):
    """Losses of a model that encodes in each forward, by torch alone; its gradients are added."""
    losses = []
    for each in microbatches(ROWS, ears=SOUNDS):
        taken = ((entry, each.units[entry.name].media.taken()) for entry in BOTH)
        loss = sum(loss_of(model.encode(*one).embeddings, each.number) for one in taken)
        losses.append(loss.detach())
        if loss.requires_grad:
            loss.backward()
    return losses


@pytest.mark.parametrize("frozen", [None, "eyes", "ears"])
@pytest.mark.parametrize(
    ("eyes", "ears"), product(POLICIES, repeat=2), ids=lambda name: name.replace(" ", "-")
)
def test_each_encoder_has_the_gradients_of_its_own_features(eyes, ears, frozen):
    model, plain = Model(entries=BOTH), Model(entries=BOTH)
    for each in (model, plain):
        if frozen is not None:
            each.get_submodule(frozen).requires_grad_(False)
    around = executors(POLICIES[eyes], POLICIES[ears])
    data = microbatches(ROWS, ears=SOUNDS)
    run_encoders(around, model, data, training=False)  # an evaluation leaves nothing behind
    expected = in_each_forward(plain)
    assert torch.equal(torch.stack(run_encoders(around, model, data)), torch.stack(expected))
    for entry in BOTH:
        found = model.gradients_of(entry)
        assert torch.allclose(found, plain.gradients_of(entry), rtol=1e-6)
        assert bool(found.any()) == (entry.name != frozen)
    assert model.outside_schedule == {"eyes", "ears"}
    assert [each._step for each in around.values()] == [None, None]


def test_operations_nest_and_gradients_are_finalized_behind_all(monkeypatch):
    done = []
    do = Executor.do

    def noted(self, when):
        if when in self._now.plan:
            done.append((self.entry.name, when))
        do(self, when)

    monkeypatch.setattr(Executor, "do", noted)
    model = Model(entries=BOTH)
    model.config.finalize_model_grads_func = lambda chunks: done.append(chunks)
    run_encoders(executors(separated, separated), model, microbatches([3], ears=[2]))
    assert done == [
        *(("eyes", BEGIN), ("ears", BEGIN)),
        *(("ears", forward(0)), ("eyes", forward(0))),
        *(("ears", gradient(0)), ("eyes", gradient(0))),
        *(("ears", END), ("eyes", END)),
        [model],
    ]


def test_one_that_streams_is_innermost() -> None:
    """The others encode before its plan begins, and go backward behind its end."""
    done: list[str] = []

    def layer(name: str, schedule: Callable[[], None]) -> Callable[[], None]:
        def around() -> None:
            done.append(name)
            schedule()

        return around

    engines: Any = {
        name: SimpleNamespace(
            mode=STREAMED if name == "eyes" else FULL_HETERO_DP,
            here=False,
            bubbles=lambda: partial(layer, "bubbles"),
            executor=lambda name=name: SimpleNamespace(around=partial(layer, name)),
        )
        for name in ("eyes", "ears")
    }
    Engine(engines).schedules(lambda: partial(done.append, "decoder"))()()
    assert done == ["ears", "eyes", "bubbles", "decoder"]
