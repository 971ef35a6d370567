"""One import of torch and Megatron on the CPU platform for all tests; ranks are forked from it."""

import os
import signal
import warnings

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings

from loongplug.platform import activate

# Beside other work a draw takes any time. What hangs is ended by the bounds of the ranks.
settings.register_profile(
    "no deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no deadline")

# What a shell without a terminal starts with & ignores Ctrl-C, as ./scripts/test.sh starts others.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before any parallel region: threads of an OpenMP pool don't survive a fork.
torch.set_num_threads(1)
_PLATFORM = activate("cpu")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from loongplug.platform.upstream import apply_upstream_replacements

    apply_upstream_replacements(_PLATFORM)


pytest_plugins = ["demo_fixtures", "s3_server", "shared_files"]


SLOW_SECONDS = 1200.0  # of several whole runs, each of which has a bound of its own


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests more time, and skip what needs a GPU on a machine without one."""
    if config.option.markexpr == "quick":
        longer = [item for item in items if item.get_closest_marker("not_quick")]
        config.hook.pytest_deselected(items=longer)
        items[:] = [item for item in items if item not in {*longer}]
    for item in items:
        if item.get_closest_marker("slow") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    if "WHOLE_SWEEP" not in os.environ:
        alike = pytest.mark.skip(reason="one of many alike; scripts/test.sh --all")
        for item in items:
            if item.get_closest_marker("sweep"):
                item.add_marker(alike)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
