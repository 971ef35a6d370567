"""Failed ranks agree on who prints: each message once, by the lowest rank that has it.

The first rank to fail is the chair. It waits a moment for others that fail too, and then writes the
verdict, which all ranks read: who speaks, and the code that all end with. Whoever fails later has
most likely failed because of it, and is silent. Where ranks tell of one fault in words of their own
(:class:`SharedFaultError`), the one that knows most speaks for them, the lowest among equals.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from torch.distributed import Store

from loongplug.parallel.store_keys import comes

# How long the first rank to fail waits for others that have found the same.
AGREEMENT_SECONDS = 1.0
# Beyond that, for a verdict, before a failed rank takes the chair for dead and speaks itself.
CHAIR_SECONDS = 5.0

_POSTS, _ALL_POSTED, _VERDICT = "posts", "all_posted", "verdict"


class SharedFaultError(ValueError):
    """A fault that ranks meet together and tell each in its own words; one of them is printed.

    ``fault`` is the same on all of them, ``knows`` is larger where the words say more.
    """

    def __init__(self, text: str, *, fault: str, knows: int) -> None:
        super().__init__(text)
        self.fault, self.knows = fault, knows


@dataclass(frozen=True)
class Failure:
    """What a rank posts; ``message`` is what equal failures have in common.

    Below 0, it ``knows`` only that another rank is gone, and is silent where any knows more.
    """

    rank: int
    message: str
    code: int
    knows: int = 0


@dataclass(frozen=True)
class Verdict:
    """Who prints its message, and the code that every rank ends with."""

    speakers: list[int]
    code: int


def agree(store: Store, mine: Failure, *, world_size: int) -> Verdict:
    """Post this rank's failure; gives the verdict, within a few seconds.

    Raises:
        RuntimeError: the store is gone.
    """
    number = store.add(_POSTS, 1)
    store.set(f"{_POSTS}/{number}", json.dumps(asdict(mine)))
    if number == world_size:
        store.set(_ALL_POSTED, "1")
    if number > 1:
        if comes(store, _VERDICT, seconds=AGREEMENT_SECONDS + CHAIR_SECONDS):
            return read_verdict(store)
        posts = [mine]
    else:
        comes(store, _ALL_POSTED, seconds=AGREEMENT_SECONDS)
        posts = [mine, *_others(store)]
    posts = [post for post in posts if post.knows >= 0] or posts
    speakers: dict[str, int] = {}
    for post in sorted(posts, key=lambda post: (-post.knows, post.rank)):
        speakers.setdefault(post.message, post.rank)
    verdict = Verdict(sorted(speakers.values()), mine.code)
    store.set(_VERDICT, json.dumps(asdict(verdict)))
    return verdict


def is_settled(store: Store) -> bool:
    """Whether there is a verdict. Raises RuntimeError when the store is gone."""
    return bool(store.check([_VERDICT]))


def read_verdict(store: Store) -> Verdict:
    """The verdict, where there is one. Raises RuntimeError when the store is gone."""
    return Verdict(**json.loads(store.get(_VERDICT)))


def _others(store: Store) -> Iterator[Failure]:
    """What has been posted behind the chair's."""
    for number in range(2, store.add(_POSTS, 0) + 1):
        post = f"{_POSTS}/{number}"
        if comes(store, post, seconds=AGREEMENT_SECONDS):  # else, it was killed before it posted
            yield Failure(**json.loads(store.get(post)))
