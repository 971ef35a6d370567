"""One rank's error is everyone's, and a bug stays recognisable as one."""

import pytest
from ranks import run_ranks

from loongplug.checkpoint.agreement import CommonRuntimeError, CommonValueError, raise_together


def meet(rank, *, errors):
    """Type, text and cause of what is raised."""
    try:
        raise_together(errors[rank])
    except Exception as error:
        return type(error), str(error), type(error.__cause__)
    return None


def test_nothing_is_raised_without_an_error():
    assert run_ranks(meet, 2, errors=[None, None]) == [None, None]


def test_a_wrong_value_on_one_rank_is_a_value_error_on_all():
    results = run_ranks(meet, 3, errors=[None, ValueError("no folder"), None])
    text = "rank 1: no folder"
    assert results == [
        (CommonValueError, text, type(None)),
        (CommonValueError, text, ValueError),
        (CommonValueError, text, type(None)),
    ]


def test_the_same_error_on_all_ranks_is_said_once():
    results = run_ranks(meet, 2, errors=[ValueError("no folder")] * 2)
    assert results == [(CommonValueError, "no folder", ValueError)] * 2


def test_a_bug_on_one_rank_is_a_runtime_error_on_all():
    results = run_ranks(meet, 3, errors=[ValueError("no folder"), KeyError("weight"), None])
    text = "rank 0: no folder\nrank 1: KeyError: 'weight'"
    assert results == [
        (CommonRuntimeError, text, ValueError),
        (CommonRuntimeError, text, KeyError),
        (CommonRuntimeError, text, type(None)),
    ]


@pytest.mark.quick
def test_alone_the_kinds_are_the_same():
    raise_together(None)
    with pytest.raises(ValueError, match="no folder"):
        raise_together(ValueError("no folder"))
    with pytest.raises(RuntimeError, match="KeyError: 'weight'") as caught:
        raise_together(KeyError("weight"))
    assert isinstance(caught.value.__cause__, KeyError)
