"""The fast subset is not a weak one."""

import pytest

pytestmark = pytest.mark.quick

# Where each is; one case of it is enough.
PROOFS = {
    "a heterogeneous run": "training/test_hetero_faults.py::test_without_a_fault_they_agree",
    "a fault that is found": "training/test_hetero_faults.py::test_a_wrong_factor_shows",
    "an agreement with transformers": "models/test_families_agreement.py::test_step_agrees_with_",
}


@pytest.mark.parametrize("proof", PROOFS)
def test_it_has(request: pytest.FixtureRequest, proof: str) -> None:
    if request.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        pytest.skip("looks at all tests")
    quick = [item for item in request.session.items if item.get_closest_marker("quick")]
    assert any(PROOFS[proof] in item.nodeid for item in quick)
