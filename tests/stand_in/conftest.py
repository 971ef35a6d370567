"""What the tests of the stand-in share; without a compiler they are skipped with the reason."""

from pathlib import Path

import pytest
from parity.matrix import Matrix

from stand_in import apart
from stand_in.extension import build, reason_without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_without()
    if reason is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """In a process of its own, see :mod:`stand_in.apart`."""
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    apart.call(pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    return True


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """Before ranks are forked, whose bounds are for what they do."""
    if reason_without() is None:
        build()


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Weights and data of the parity matrix's cells."""
    return Matrix(tmp_path_factory.mktemp("matrix"))
