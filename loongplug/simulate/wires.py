"""How messages go in another way: programs made of programs, one for each way of sending. Pure."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from loongplug.simulate.programs import Act, End, Post, Programs, RankMessage, Wait


def windowed(programs: Programs, *, most: int, of: Callable[[Hashable], bool]) -> Programs:
    """Programs with at most so many messages of each stream that is ``of`` under way at a time.

    Who sends one more waits for the message ``most`` before; nobody waits for it where that is
    eager.
    """

    def acts(own: Sequence[Act]) -> Iterator[Act]:
        sent: defaultdict[Hashable, list[int]] = defaultdict(list)
        for act in own:
            yield act
            for message, sends in act.ends if isinstance(act, Post) else ():
                stream = programs.messages[message].stream
                if not sends or not of(stream):
                    continue
                sent[stream].append(message)
                if len(sent[stream]) > most:
                    yield Wait(((sent[stream][-1 - most], True),))

    return replace(programs, ranks=tuple(tuple(acts(own)) for own in programs.ranks))


def with_shapes(programs: Programs, *, of: Callable[[Hashable], bool]) -> Programs:
    """Programs with a message ahead of each that is ``of``, for its shape; both ends wait for it.

    Those of one :class:`Post` are one handshake, as in Megatron.
    """
    messages = programs.messages
    announced = [number for number, each in enumerate(messages) if of(each.stream)]
    ahead = {each: len(messages) + number for number, each in enumerate(announced)}
    shapes_of = (messages[each] for each in announced)
    shapes = (RankMessage(("shape of", each.stream), each.which, each.eager) for each in shapes_of)

    def acts(own: Sequence[Act]) -> Iterator[Act]:
        for act in own:
            if isinstance(act, Post):
                ends = tuple((ahead[each], sends) for each, sends in act.ends if each in ahead)
                yield from (Post(ends), Wait(ends)) if ends else ()
            yield act

    ranks = tuple(tuple(acts(own)) for own in programs.ranks)
    return replace(programs, ranks=ranks, messages=(*messages, *shapes))


def on_streams(
    programs: Programs,
    *,
    communicator: Callable[[Hashable], Hashable],
    pool: int = 32,  # torch hands out so many of one priority, and then the same again
    one_queue: bool = False,
) -> Programs:
    """On devices, where each communicator of a rank has a stream, and its messages go in turn.

    ``communicator`` has that of a message's stream, None where none is used. Streams come from a
    ``pool``: behind so many communicators, in the order in which the rank uses them first, two
    share one. With ``one_queue`` (``CUDA_DEVICE_MAX_CONNECTIONS=1``) what a rank gives to its
    device begins in that order, so that a message that cannot begin holds up all behind it.
    """
    behind = [[*each.behind] for each in programs.messages]

    def acts(own: Sequence[Act]) -> Iterator[Act]:
        streams: dict[Hashable, int] = {}
        latest: dict[int, End] = {}  # by stream
        for act in own:
            if not isinstance(act, Post):
                yield act
                continue
            for message, sends in act.ends:
                used = communicator(programs.messages[message].stream)
                if used is not None:
                    stream = streams.setdefault(used, len(streams)) % pool
                    if stream in latest:
                        behind[message].append(latest[stream][0])
                        if one_queue:
                            yield Wait((latest[stream],))
                    latest[stream] = message, sends
                yield Post(((message, sends),))

    ranks = tuple(tuple(acts(own)) for own in programs.ranks)
    each_behind = zip(programs.messages, behind, strict=True)
    messages = tuple(each._replace(behind=tuple(others)) for each, others in each_behind)
    return replace(programs, ranks=ranks, messages=messages)
