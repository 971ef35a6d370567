"""Which tokens are which."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def among(ids: NDArray[np.int64], few: Iterable[int]) -> NDArray[np.bool_]:
    """Where ``ids`` [n] are one of a ``few``, [n]; for a few in less time than np.isin."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for token in few:
        found |= ids == token
    return found
