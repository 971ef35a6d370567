"""Loss curves in several places."""

import pytest

from parity.curves import SETTINGS, curves_of, largest_range, make_weights


@pytest.mark.quick
def test_the_largest_range_is_of_one_step_and_all_curves():
    curves = {"a": [1.0, 2.0, 3.0], "b": [1.5, 2.0, 3.0], "c": [1.25, 2.75, 3.0]}
    assert largest_range(curves) == (0.75, 2)


@pytest.mark.slow
@pytest.mark.sweep  # cells of the parity matrix are held against one rank step by step
@pytest.mark.parametrize(
    "name", ["decoder frozen", pytest.param("decoder trained", marks=pytest.mark.sweep)]
)
def test_the_first_steps_of_a_curve_are_the_single_ranks(name, demo, tmp_path):
    make_weights(demo, tmp_path / "weights")
    found = curves_of(
        SETTINGS[name],
        data=demo,
        weights=tmp_path / "weights",
        steps=2,
        places=("1/1/1|1/1/1",),
    )
    single, apart = found.values()
    assert apart == pytest.approx(single, abs=1e-5)
    assert single[0] != single[1]
