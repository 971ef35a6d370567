"""Several pytest processes share the files of tests: each runs those that it comes to first.

``scripts/test.sh`` starts one more than there are cores: ranks wait for each other much of the
time, and many tests have one rank only, so that one file after the other leaves cores idle. A file
is run by one process, and its module fixtures are made once.
"""

import os
from pathlib import Path

import pytest

FOLDER = "LOONGPLUG_TEST_SHARES"  # in the environment: where the processes leave their claims


class Shares:
    """Passes over the tests of files that another process has claimed in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: dict[str, bool] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """True: done with, as far as this process goes."""
        file = item.location[0]
        if file not in self._mine:
            self._mine[file] = self._claim(file)
        if self._mine[file]:
            return None
        # What our last test left standing for this one (its folder) may not be the next one's.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _claim(self, file: str) -> bool:
        try:
            (self._folder / file.replace(os.sep, "--")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get(FOLDER):
        config.pluginmanager.register(Shares(Path(folder)))
