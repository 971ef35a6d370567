"""Groups of parameters are found again by their module."""

from typing import Any

import pytest

from loongplug.parallel.parameter_groups import groups_to_load

pytestmark = pytest.mark.quick


def group(module: str, **settings: Any) -> dict[str, Any]:
    named = {"module": module, "max_lr": 1.0, "min_lr": 0.1, "wd_mult": 1.0, "betas": (0.9, 0.95)}
    return named | settings


def test_groups_are_found_by_module():
    def saved_rates(own: dict[str, Any], *saved: dict[str, Any]) -> Any:
        (loaded,), (rates,) = groups_to_load([own], saved)
        assert loaded["betas"] == (0.8, 0.9)
        assert (loaded["max_lr"], loaded["min_lr"]) == rates.own == (own["max_lr"], own["min_lr"])
        assert loaded["wd_mult"] == own["wd_mult"]
        return rates.saved

    def was(module: str, **settings: Any) -> dict[str, Any]:
        return group(module, betas=(0.8, 0.9), **settings)

    encoder, projector = was("encoder", max_lr=2.0), was("projector", max_lr=3.0)
    biases = was("encoder", max_lr=4.0, wd_mult=0.0)
    assert saved_rates(group("encoder"), biases, projector, encoder) == (2.0, 0.1)
    assert saved_rates(group("encoder", wd_mult=0.0), encoder, projector, biases) == (4.0, 0.1)
    assert saved_rates(group("encoder", is_expert_parallel=True), encoder) is None
    assert saved_rates(group("encoder"), projector) is None
