import pytest

from loongplug.data.cache import ByteBoundedCache

pytestmark = pytest.mark.quick


def test_forgets_what_was_used_longest_ago() -> None:
    cache: ByteBoundedCache[str, int] = ByteBoundedCache(10)
    cache.put("a", 1, size=4)
    cache.put("b", 2, size=4)
    assert cache.get("a") == 1  # now "b" is the oldest
    cache.put("c", 3, size=4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_size_counts_once_when_a_value_is_replaced() -> None:
    cache: ByteBoundedCache[str, int] = ByteBoundedCache(10)
    for value in range(5):
        cache.put("a", value, size=4)
    cache.put("b", 9, size=6)
    assert (cache.get("a"), cache.get("b"), len(cache)) == (4, 9, 2)


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache: ByteBoundedCache[str, int] = ByteBoundedCache(10)
    cache.put("a", 1, size=4)
    cache.put("b", 2, size=11)
    assert (cache.get("a"), cache.get("b")) == (1, None)
