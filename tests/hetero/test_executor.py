"""Plans in action: the same numbers wherever things are, memory let go, and every wait needed."""

from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch
from lazy_copies import LazyCopies
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from on_a_gpu import in_fresh_interpreter
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from toy_step import PIXELS, WIDTH, Device, Model, Wires, executor_of, microbatches, run_step

from loongplug.data.microbatch import MediaToCome
from loongplug.hetero import encoder_state
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.operations import BEGIN, Encode, Kept
from loongplug.hetero.policies import group_ahead, separated
from loongplug.platform import current_platform
from loongplug.platform.prefetch import Copies

pytestmark = pytest.mark.quick

ROWS = [3, 5, 2, 4, 7]
MOVABLE = (Kept.FEATURES, Kept.ACTIVATIONS, Kept.STATE)
SETS = [frozenset(each) for each in chain.from_iterable(combinations(MOVABLE, n) for n in range(4))]


@pytest.fixture(autouse=True)
def _all_of_it(monkeypatch):
    monkeypatch.setattr(encoder_state, "_SMALL", 1)


def numbers(
    rows: list[int],
    *,
    copies: Copies,
    on_host: frozenset[Kept] = frozenset(),
    policy=separated,
    last_stage: bool = True,
    trains: bool = True,
) -> Tensor:
    """Losses, the encoder's gradients and weights of two steps and an evaluation between them."""
    model = Model(trains=trains)
    executor = executor_of(policy, copies, on_host=on_host, last_stage=last_stage)
    found = []
    for training in (True, False, True):
        found += run_step(executor, model, rows, training=training)
        found += [each.detach().sum() for each in (*model.parameters(), model.gradients)]
        if training:
            last = model.gradients
        for each in model.parts["eyes"].buffers:
            each.grad_data.zero_()  # as Megatron does before each step
    return torch.cat([torch.stack(found), last])


same = torch.equal


@pytest.mark.parametrize("on_host", SETS, ids=lambda each: "+".join(k.name for k in each) or "none")
@pytest.mark.parametrize("copies", [LazyCopies, Copies])
@pytest.mark.parametrize("rows", [ROWS, [4], [1, 2], [0, 3, 0]])
def test_numbers_are_those_of_what_stays(on_host, copies, rows):
    expected = numbers(rows, copies=Copies(), policy=group_ahead)
    for last_stage in (True, False):
        found = numbers(rows, copies=copies(), on_host=on_host, last_stage=last_stage)
        assert same(found, expected)


def test_a_frozen_encoder_has_no_gradients_and_leaves_nothing():
    on_host = frozenset(MOVABLE)
    found = numbers(ROWS, copies=LazyCopies(), on_host=on_host, trains=False)
    assert same(found, numbers(ROWS, copies=Copies(), trains=False))


def one_step(
    copies: Copies, on_host: frozenset[Kept], *, last_stage: bool, policy=separated
) -> Tensor:
    model = Model()
    executor = executor_of(policy, copies, on_host=on_host, last_stage=last_stage)
    losses = run_step(executor, model, ROWS)
    weights = [each.detach().flatten() for each in model.parameters()]
    return torch.cat([torch.stack(losses), model.gradients, *weights])


@pytest.mark.parametrize("last_stage", [True, False])
@pytest.mark.parametrize("what", MOVABLE)
def test_without_any_of_its_waits_numbers_are_wrong(what, last_stage):
    on_host = frozenset({what})
    counted = LazyCopies()
    expected = one_step(counted, on_host, last_stage=last_stage)
    assert counted.waits
    unseen = {
        forgotten
        for forgotten in range(counted.waits)
        if same(one_step(LazyCopies(forgotten=forgotten), on_host, last_stage=last_stage), expected)
    }
    assert not unseen


@pytest.mark.parametrize("on_host", SETS, ids=lambda each: "+".join(k.name for k in each) or "none")
@pytest.mark.parametrize(
    ("rows", "most", "passes"),
    [
        (ROWS, 10, 3),  # 3 + 5 + 2, 4, 7
        (ROWS, 100, 1),
        (ROWS, 1, 5),  # below one unit: each by itself
        ([0, 0, 3], 5, 1),
        ([0, 0], 5, 1),
        ([3, 4, 0], 3, 2),
    ],
)
def test_units_that_are_joined_have_the_numbers_of_each_by_itself(on_host, rows, most, passes):
    found = []
    for joined_rows in (0, most):
        model = Model()
        executor = executor_of(
            separated, LazyCopies(), on_host=on_host, last_stage=False, joined_rows=joined_rows
        )
        losses = run_step(executor, model, rows)
        if Kept.ACTIVATIONS in on_host:
            assert model.passes == len(rows)  # they leave unit by unit
        elif joined_rows:
            assert model.passes == passes
        found.append((torch.stack(losses), model.gradients))
    for singly, joined in zip(*found, strict=True):
        assert (joined - singly).abs().max() <= 1e-6 * singly.abs().max()
    assert found[0][1].any() == bool(sum(rows))


class Noted:
    """Storages by what they are, and how many bytes of them are alive."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}
        self.counts: list[int] = []

    def note(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            storage = tensor.untyped_storage()
            self._noted[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def alive(self) -> int:
        return sum(nbytes for storage, nbytes in self._noted.values() if not storage.expired())

    def count(self) -> None:
        self.counts.append(self.alive())


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("joined_rows", "most"), [(0, 7), (7, 7), (100, sum(ROWS))])
def test_media_are_there_while_their_pass_is_at_work(monkeypatch, joined_rows, most, trains):
    """The first pass begins before those of the last one are loaded. Values are never kept."""
    model, passes, taken = Model(trains=trains), [], MediaToCome.taken
    loaded, values, alive = Noted(), Noted(), []

    def noted(media):
        passes.append(model.passes)
        found = taken(media)
        loaded.note(found.loaded)
        loaded.count()

        def decode(given):
            rows = found.decode(given)
            values.note(rows)
            values.count()
            return rows

        return replace(found, decode=decode)

    monkeypatch.setattr(MediaToCome, "taken", noted)
    executor = executor_of(separated, Copies(), joined_rows=joined_rows)
    run_step(executor, model, ROWS, seen=lambda: alive.append((loaded.alive(), values.alive())))
    assert passes == {0: [0, 1, 2, 3, 4], 7: [0, 1, 1, 2, 3], 100: [0] * 5}[joined_rows]
    assert max(values.counts) == most * PIXELS * 4
    assert {each for _, each in alive} == {0}
    if not trains:
        assert max(loaded.counts) == most * PIXELS
        assert {each for each, _ in alive} == {0}


@pytest.mark.parametrize(("joined_rows", "views"), [(0, False), (100, True)])
def test_what_is_in_one_piece_is_let_go_unit_by_unit(joined_rows, views):
    """What arrives, and what an exchange hands on as views of a pass."""
    alive, whole = [], Noted()

    class Watched(Wires):
        def gather_variable_shape_embeddings(self, payloads, spec):
            found = {unit: each.detach() for unit, each in payloads.items()}
            if not views:
                found = super().gather_variable_shape_embeddings(payloads, spec)
            whole.note(found[0])
            return found

    executor = executor_of(separated, Copies(), joined_rows=joined_rows)
    executor.exchange = Watched()
    run_step(executor, Model(), ROWS, seen=lambda: alive.append(whole.alive()))
    assert set(alive) == {0}


@pytest.mark.parametrize("on_host", [frozenset(), frozenset({Kept.FEATURES})], ids=["here", "away"])
def test_features_are_held_once_but_for_those_of_sixteen_units(on_host):
    """What comes is copied out of what it came in, which is gone before more comes."""
    rows = [2] * 40
    features, came, most = Noted(), Noted(), []

    class Watched(Wires):
        def gather_variable_shape_embeddings(self, payloads, spec):
            assert came.alive() == 0
            for each in executor._now.features.values():
                features.note(each)
            found = super().gather_variable_shape_embeddings(payloads, spec)
            came.note(found[0])
            most.append(features.alive() + 2 * came.alive())
            return found

    executor = executor_of(separated, Copies(), on_host=on_host)
    executor.exchange = Watched()
    run_step(executor, Model(), rows)
    each = 2 * WIDTH * 4
    assert max(most) == (2 * 16 if on_host else 40 + 8) * each


def test_a_gradient_that_did_not_come_is_missed():
    executor = executor_of(separated, Copies())
    model = Model()
    with pytest.raises(AssertionError, match=r"no gradient came for pieces \[0, 1\]"):
        run_step(executor, model, [3, 4], backwards=False)


def test_what_a_plan_makes_and_nobody_uses_is_missed():
    executor = executor_of(lambda step: {BEGIN: (Encode(pieces=(0,)),)}, Copies())
    executor.begin(model := Model(), microbatches([3]), training=False)
    assert model.outside_schedule == {"eyes"}
    with pytest.raises(AssertionError, match=r"nobody used what there is of pieces \[0\]"):
        executor.end()


class Plan(AbstractSchedulePlan):
    """What a schedule that overlaps is given in an output's place."""

    def __init__(self):
        self.backward = lambda: None

    def on_backward(self, call):
        self.backward = call

    @classmethod
    def run(cls, *_, **__):
        raise NotImplementedError


def state_away(
    schedule: str, *, last_stage: bool, training: bool = True, plans: bool = False
) -> str:
    """Whether the state is away, as . (here) or # (away), at each pass, and at last.

    At forwards' beginning and behind backwards. ``schedule`` has F and B with their chunks. With
    ``plans``, forward steps give these, as with the experts' exchange overlapped.
    """
    device = Device(Copies())
    on_host = frozenset({Kept.STATE})
    executor = executor_of(separated, None, on_host=on_host, last_stage=last_stage, device=device)
    chunks = [Model(trains=False), Model()]
    executor.host.state = EncoderState(chunks[0].parts["eyes"], [], platform=device)
    seen = []

    def look():
        seen.append("#" if device.away else ".")

    def forward_step(data_iterator, chunk):
        look()
        if chunk is chunks[0]:
            executor.features(next(data_iterator).number)
        return Plan() if plans else torch.ones(1, requires_grad=training) * 2, None

    def runs(*, forward_step_func, data_iterator, **_):
        outputs = {chunk: [] for chunk in chunks}
        for step in schedule.split():
            chunk = chunks[int(step[1])]
            if step[0] == "F":
                outputs[chunk].append(forward_step_func(data_iterator, chunk)[0])
            else:
                outputs[chunk].pop(0).backward()
                look()

    number = schedule.count("F0")
    executor.around(runs)(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches([2] * number)),
        model=chunks,
        num_microbatches=number,
        forward_only=not training,
    )
    look()
    return "".join(seen)


INTERLEAVED = "F0 F0 F1 B1 F1 B1 B0 B0"


@pytest.mark.parametrize(
    ("schedule", "options", "away"),
    [
        # The second forward begins when it has gone, and the last backward when it has come.
        ("F0 F0 B0 B0", {"last_stage": False}, ".##.."),
        (INTERLEAVED, {"last_stage": False}, ".######.."),
        (INTERLEAVED, {"last_stage": False, "plans": True}, ".######.."),
        # Where one microbatch is in flight, it is away all the time.
        ("F0 B0 F0 B0 F0 B0", {"last_stage": True}, "######."),
        ("F0 B0", {"last_stage": False}, "##."),
        ("F0 B0", {"last_stage": True}, "##."),
        # In evaluation it comes back at the end.
        ("F0 F0 F0", {"last_stage": False, "training": False}, ".##."),
        ("F0 F0 F0", {"last_stage": True, "training": False}, "###."),
        ("F0", {"last_stage": False, "training": False}, "#."),
    ],
)
def test_when_the_state_is_away(schedule, options, away):
    assert state_away(schedule, **options) == away


@pytest.mark.gpu
def test_on_a_gpu():
    in_fresh_interpreter(__file__, "travels_on_a_gpu")


def travels_on_a_gpu():
    """Numbers of what stays, wherever things are, and of units that are joined to one pass."""
    platform = current_platform()

    def numbers(on_host, *, joined_rows=0, passes=4):
        with torch.device(platform.device):
            model = Model()
        executor = executor_of(
            separated,
            platform.copies(),
            on_host=on_host,
            device=platform,
            last_stage=False,
            joined_rows=joined_rows,
        )
        losses = run_step(executor, model, [300, 500, 200, 400])
        assert model.passes == passes
        return torch.cat([torch.stack(losses), model.gradients]).cpu()

    expected = numbers(SETS[0])
    for on_host in SETS[1:]:
        assert torch.equal(numbers(on_host), expected)
    for joined_rows, passes in ((800, 2), (2000, 1)):
        joined = numbers(SETS[0], joined_rows=joined_rows, passes=passes)
        assert (joined - expected).abs().max() <= 1e-5 * expected.abs().max()
