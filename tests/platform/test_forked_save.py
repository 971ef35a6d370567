"""How forked writers of asynchronous saves answer."""

import multiprocessing
import os
import queue
from typing import Any

import pytest

from loongplug.platform.upstream_saving import ForkedResults

pytestmark = pytest.mark.quick


def answer_of(function: Any) -> Any:
    results = ForkedResults()
    process = multiprocessing.get_context("fork").Process(target=function, args=(results,))
    process.start()
    process.join()
    return results.get_nowait()


def test_an_answer_of_any_size_waits_for_the_writer_s_end():
    assert answer_of(lambda results: results.put("x" * 1_000_000)) == "x" * 1_000_000


def test_a_writer_that_died_has_left_none():
    with pytest.raises(queue.Empty):
        answer_of(lambda results: os._exit(1))


def test_half_an_answer_is_none():
    def half(results: ForkedResults) -> None:
        results._file.write(b"\x80\x04\x95")
        results._file.flush()
        os._exit(1)

    with pytest.raises(queue.Empty):
        answer_of(half)
