"""An operation on the meta device gives the same tensors when its shapes are remembered."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loongplug.estimate.remembered import RememberedShapes, storages

pytestmark = pytest.mark.quick

aten = torch.ops.aten
META = torch.device("meta")


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=META)


CASES = {
    "broadcast": (aten.add.Tensor, (empty(4, 1), empty(1, 8)), {}),
    "strides": (aten.mul.Tensor, (empty(8, 4).t(), 2.0), {}),
    "several results": (aten.native_layer_norm.default, (empty(2, 8), [8], None, None, 1e-5), {}),
    "no result in a place": (
        aten.native_layer_norm_backward.default,
        (empty(2, 8), empty(2, 8), [8], empty(2, 1), empty(2, 1), None, None, [True, False, False]),
        {},
    ),
    "lists": (aten.cat.default, ([empty(2, 3), empty(5, 3)],), {}),
    "another dtype": (aten._to_copy.default, (empty(2, 3),), {"dtype": torch.bfloat16}),
}


class Made(TorchDispatchMode):
    """Notes which operations are run."""

    def __init__(self) -> None:
        super().__init__()
        self.by: set[object] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.by.add(func)
        return func(*args, **(kwargs or {}))


def described(result):
    return [
        each if each is None else (each.shape, each.stride(), each.dtype, each.device)
        for each in (result if isinstance(result, tuple) else (result,))
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_same_tensors_come_again_with_storages_of_their_own(name):
    func, args, kwargs = CASES[name]
    shapes = RememberedShapes()
    expected = func(*args, **kwargs)
    results = [shapes.run(func, args, kwargs)]
    with Made() as made:
        results += [shapes.run(func, args, kwargs) for _ in range(2)]
    assert made.by == {aten.empty_strided.default}
    for result in results:
        assert type(result) is type(expected)
        assert described(result) == described(expected)
    own = [storages(each).keys() for each in results]
    assert len(set().union(*own)) == sum(map(len, own))


def test_numbers_of_different_kinds_are_different_arguments():
    shapes = RememberedShapes()
    whole = empty(3, dtype=torch.int64)
    for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):
        for _ in range(2):
            assert shapes.run(aten.mul.Tensor, (whole, number), {}).dtype == dtype


def test_what_shares_or_changes_memory_is_run_each_time():
    shapes = RememberedShapes()
    tensor = empty(4, 2)
    for _ in range(2):
        for func, args in (
            (aten._unsafe_view.default, (tensor, [8])),  # of which the schema tells no sharing
            (aten.view.default, (tensor, [8])),
            (aten.add_.Tensor, (tensor, 1.0)),
        ):
            assert storages(shapes.run(func, args, {})).keys() == storages(tensor).keys()
