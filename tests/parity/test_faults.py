"""The list of built-in faults is whole, and its table says what was run."""

import ast

import pytest

from parity.faults import FAULTS, SUITES, TESTS, Found, page

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("module", sorted({fault.module for fault in FAULTS}))
def test_every_fault_of_a_module_is_listed(module):
    """Each is a function of a rank, which is all that it is given."""
    path = TESTS / f"{module.replace('.', '/')}.py"
    functions = [
        each
        for each in ast.parse(path.read_text()).body
        if isinstance(each, ast.FunctionDef) and [arg.arg for arg in each.args.args] == ["rank"]
    ]
    found = {each.name for each in functions if not each.args.kwonlyargs}
    assert found == {fault.name for fault in FAULTS if fault.module == module}


def test_the_page_tells_what_was_found_and_what_was_not_run():
    first, second, *_ = FAULTS
    one, other, *_ = SUITES
    results = {
        (first.name, one): Found(fault=first.name, suite=one, failed=2, passed=1, ended=""),
        (second.name, other): Found(fault=second.name, suite=other, failed=0, passed=3, ended=""),
    }
    text = page(results)
    assert f"| `{first.name}` | {first.trap} | **2** of 3 |  |" in text
    assert f"| `{second.name}` | {second.trap} |  | 0 of 3 |" in text
    assert text.count("| `") == len(FAULTS)


def test_suites_are_there():
    assert all((TESTS / each.split("::")[0]).is_file() for each in sum(SUITES.values(), ()))
