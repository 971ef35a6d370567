"""The store that ranks meet in when torchrun has started them again.

torchrun keeps one store for all attempts, and torch names its keys alike in each: a rank would
connect to the addresses of ranks that are gone.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore


def store_of_attempt() -> Store | None:
    """torchrun's store with the keys of this attempt; None in a first one, or without torchrun.

    A new connection; MASTER_ADDR and MASTER_PORT say where.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"loongplug/attempt/{attempt}", store)


def in_own_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``_initialize_distributed`` that has ranks meet in the store of their attempt."""

    @functools.wraps(original)
    def _initialize_distributed(
        get_embedding_ranks: Any,
        get_position_embedding_ranks: Any,
        store: Any,
        skip_model_parallel_init: bool = False,
    ) -> Any:
        return original(
            get_embedding_ranks,
            get_position_embedding_ranks,
            store or store_of_attempt(),
            skip_model_parallel_init=skip_model_parallel_init,
        )

    return _initialize_distributed
