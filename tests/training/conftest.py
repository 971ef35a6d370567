"""What whole runs of the tiny model start from."""

from pathlib import Path

import pytest
from compared_runs import first_weights
from demo_fixtures import flags_of


@pytest.fixture(scope="session")
def weights(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Hugging Face folder of weights, so that runs in any layout can be compared."""
    return first_weights(flags_of(demo), tmp_path_factory.mktemp("weights") / "hf")
