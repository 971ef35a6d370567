"""Who sends messages to whom, and how many communicators NCCL makes of it. Pure.

In a process group, NCCL has a communicator for what all ranks do together, and one for each two
ranks that send each other messages. Each has a CUDA stream, and memory on the device.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from loongplug.hetero.placement import ApartPiece, Edge
from loongplug.parallel.layout import Layout

Pair = tuple[int, int]  # who sends, and who receives

# Of Megatron's groups, those that a step, its optimizer or a save works in, by the layout's kinds.
_DENSE = ("tp", "cp", "pp", "dp_cp", "tp_pp", "tp_cp_dp_pp")
_OF_EXPERTS = ("ep", "etp", "edp", "etp_ep", "etp_ep_pp")


def piece_pairs(edges: Iterable[Edge], *, cp: int) -> list[Pair]:
    """Who sends whom features within model replicas, of an encoder that lies on all ranks."""
    meetings = (
        edge.meetings(replica, cp=cp) for edge in edges for replica in range(len(edge.replicas))
    )
    return sorted({(source, target) for source, target in chain(*meetings) if source != target})


def pipeline_pairs(ranks: Sequence[int], *, virtual: bool) -> dict[str, list[Pair]]:
    """Who sends what to whom in a pipeline of these ranks, by the name of the process group."""
    there = {"activations": [*pairwise(ranks)]}
    if virtual:
        there["activations_around"] = [(ranks[-1], ranks[0])]
    back = {name.replace("activations", "gradients"): reverse(there[name]) for name in there}
    return there | back


def apart_pairs(pieces: Iterable[ApartPiece], *, cp: int) -> list[Pair]:
    """Who sends features of these ``pieces`` to whom."""
    return sorted({*chain(*(each.edge.meetings(each.replica, cp=cp) for each in pieces))})


def stage_pairs(layout: Layout) -> list[Pair]:
    """Who hands states on to whom, between the stages of an encoder."""
    return [pair for ranks in layout.groups("pp") for pair in pairwise(ranks)]


def there_and_back(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs of the process group of a kind of rows, and of that of what comes back for them."""
    there = [*pairs]
    return [there, reverse(there)]


def reverse(pairs: Iterable[Pair]) -> list[Pair]:
    """The way back."""
    return [(receiver, sender) for sender, receiver in pairs]


def count(groups: Iterable[Iterable[Pair]]) -> Counter[int]:
    """The communicators of each rank in process groups in which these pairs send messages."""
    joined = chain(*({frozenset(pair) for pair in pairs} for pairs in groups))
    return Counter(chain(*joined))


def megatrons(layout: Layout, *, experts: bool) -> int:
    """The communicators of Megatron's groups for one module on each of its ranks."""
    kinds = (*_DENSE, *(_OF_EXPERTS if experts else ()))
    return sum(len(layout.group(kind, layout.first_rank)) > 1 for kind in kinds)
