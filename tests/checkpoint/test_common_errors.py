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
