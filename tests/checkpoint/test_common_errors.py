"""One rank's error is everyone's, and a bug stays recognisable as one."""

import pytest
from ranks import run_ranks

from loongplug.checkpoint.common_errors import CommonRuntimeError, CommonValueError, raise_together


def meet(rank, *, errors):
    """Type, text and cause of what is raised."""
    try:
        raise_together(errors[rank])
    except Exception as error:
        return type(error), str(error), type(error.__cause__)
    return None


WRONG, BUG = ValueError("no folder"), KeyError("weight")


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ([None, WRONG, None], CommonValueError, "rank 1: no folder"),
        ([WRONG, WRONG], CommonValueError, "no folder"),  # said once
        ([WRONG, BUG, None], CommonRuntimeError, "rank 0: no folder\nrank 1: KeyError: 'weight'"),
    ],
)
def test_an_error_on_one_rank_is_everyones(errors, kind, text):
    results = run_ranks(meet, len(errors), errors=errors)
    assert results == [(kind, text, type(error)) for error in errors]


def test_nothing_is_raised_without_an_error():
    assert run_ranks(meet, 2, errors=[None, None]) == [None, None]


@pytest.mark.quick
def test_alone_the_kinds_are_the_same():
    raise_together(None)
    with pytest.raises(ValueError, match="no folder"):
        raise_together(ValueError("no folder"))
    with pytest.raises(RuntimeError, match="KeyError: 'weight'") as caught:
        raise_together(KeyError("weight"))
    assert isinstance(caught.value.__cause__, KeyError)
