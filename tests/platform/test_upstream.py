"""The table of replaced Megatron functions against the installed Megatron."""

import types
from typing import Any

import pytest
import torch

from loongplug.platform import current_platform
from loongplug.platform.replacements import Replacement, resolve
from loongplug.platform.upstream import EVERYWHERE, ON_CPU, apply_upstream_replacements

pytestmark = pytest.mark.quick

ROWS = EVERYWHERE + ON_CPU


def _value(row: Replacement) -> Any:
    return resolve(Replacement(target=row.target, reason=row.reason))[2]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_row_is_replaced_and_restored(row: Replacement) -> None:
    assert row.parameters is not None, "every replaced Megatron function has its parameters checked"
    table = current_platform()._tables["upstream"]  # type: ignore[attr-defined]
    active = _value(row)
    table.undo()
    try:
        original = _value(row)
        assert original is not active
        assert original.__module__.startswith("megatron.")
        resolve(row)  # the parameters are those of the installed version
    finally:
        table.apply()
    assert _value(row) is not original


def test_by_value_copies_follow() -> None:
    import megatron.training
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.training import arguments, initialize, training

    assert megatron.training.initialize_megatron is initialize.initialize_megatron
    assert training.initialize_megatron is initialize.initialize_megatron
    assert arguments.get_device_arch_version() >= 10
    assert token_dispatcher.maybe_move_tensor_to_cpu is moe_utils.maybe_move_tensor_to_cpu
    assert initialize.initialize_megatron.__wrapped__ is not None


def test_cuda_gets_no_cpu_row() -> None:
    used = []
    platform = types.SimpleNamespace(name="cuda", use=used.append)
    apply_upstream_replacements(platform)  # type: ignore[arg-type]
    assert used[0].rows == EVERYWHERE


def test_prebuilt_helpers_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets import helpers_cpp
    from megatron.core.datasets.utils import compile_helpers

    assert helpers_cpp is not None
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("make was run"))
    compile_helpers()


def test_help_texts_of_a_config_class_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.argument_utils import ArgumentGroupFactory

    first = ArgumentGroupFactory(TransformerConfig).field_docstrings
    assert "layer" in first["num_layers"]
    monkeypatch.setattr("inspect.getsource", lambda _: pytest.fail("the source was read again"))
    first["num_layers"] = "of one factory alone"
    again = ArgumentGroupFactory(TransformerConfig).field_docstrings
    assert again == first | {"num_layers": again["num_layers"]}
    assert again["num_layers"] != first["num_layers"]


def test_split_sizes_become_numbers_as_they_do_on_a_gpu() -> None:
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    sizes = maybe_move_tensor_to_cpu(torch.tensor([3, 1]), as_numpy=True, record_stream=False)
    assert not torch.is_tensor(sizes)
    assert list(sizes) == [3, 1]
    assert torch.is_tensor(maybe_move_tensor_to_cpu(torch.tensor([3])))
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None
