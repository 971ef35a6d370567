"""The matrix of modes says what the rules say."""

import pytest

from loongplug.training.rules import RULES
from pages.compatibility import MEGATRON, Matrix, Mode, markdown, matrix


@pytest.fixture(scope="module")
def cells() -> Matrix:
    return matrix()


def test_two_modes_are_refused_together_by_the_rule_that_is_about_both(cells: Matrix) -> None:
    assert cells["TP", "MoE"] == cells["MoE", "TP"] == ("expert-sequence-parallel",)
    assert cells["packing", "sample balance"] == ("balancing-by-sample",)
    assert cells["SP", "MoE"] == cells["TP", "TP"] == cells["packing", "MoE"] == ()
    assert cells["VPP", "overlap"] == cells["VPP", "MoE overlap"] == ()
    assert cells["PP", "MoE overlap"] == (MEGATRON,)
    assert cells["recompute", "MoE overlap"] == (MEGATRON,)
    assert cells["CP", "hetero DP"] == cells["CP", "full hetero"] == ()
    assert cells["hetero DP", "full hetero"] == ("one-mode",)
    assert cells["streamed", "offload"] == ("streamed-offload",)
    assert cells["streamed", "VPP"] == cells["streamed", "overlap"] == ()


def test_a_mode_that_a_rule_refuses_is_refused_with_every_other(cells: Matrix) -> None:
    refused = {one: names for (one, other), names in cells.items() if one == other and names}
    assert any(cells.values())  # else the matrix would say yes to everything
    for (one, other), names in cells.items():
        if not {one, other} & {"TP", "SP"}:  # SP makes TP fit for experts
            assert set(names) >= {*refused.get(one, ()), *refused.get(other, ())}


def test_what_megatron_alone_refuses_is_no_yes() -> None:
    modes = [Mode("lonely", "", "--overlap-param-gather")]
    assert matrix(modes) == {("lonely", "lonely"): (MEGATRON,)}


def test_every_rule_is_named(cells: Matrix) -> None:
    page = markdown(cells)
    assert all(f"\n| {rule.name} |" in page for rule in RULES)
