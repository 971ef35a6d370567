"""A cache that forgets what was used longest ago once it holds too many bytes."""

from collections import OrderedDict
from collections.abc import Hashable


class ByteBoundedCache[K: Hashable, V]:
    """Values by key, at most ``max_bytes`` of them by the sizes that the caller states."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of ``key``, which counts as used now, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, *, size: int) -> None:
        """Keep a value of ``size`` bytes, unless it is larger than the whole cache."""
        if size > self._max_bytes:
            return
        self._bytes += size - self._entries.pop(key, (value, 0))[1]
        self._entries[key] = value, size
        while self._bytes > self._max_bytes:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._bytes -= dropped
