"""Do all ranks that hold a copy of the same slice hold the same copy?

Data parallel replicas, parameters that tensor parallelism does not split, tied embeddings on two
stages, replicas of an encoder: who holds what is asked of the ranks themselves, so none of these
is named here.
"""

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongplug.checkpoint.common_errors import of_all_ranks
from loongplug.checkpoint.parameter_holders import ParameterPiece, held_parameters, sort_key
from loongplug.models.hf_mapping import Mapping
from loongplug.verify.recorded_run import ApartNote


def digest(tensor: Tensor) -> int:
    """A number that differs where two tensors differ in a bit."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


def replicas_apart(
    chunks: Sequence[nn.Module],
    mapping: Mapping,
    select: Callable[[nn.Parameter], Tensor | None],
    *,
    what: str,
) -> list[ApartNote]:
    """The slices of which not all copies are bit-identical, the same list on every rank.

    ``what`` says what of a parameter it is that ``select`` gives. Collective: the default group.
    """
    mine: list[tuple[ParameterPiece, str, Tensor]] = []
    for own in held_parameters(chunks, mapping):
        tensor = select(own.parameter)
        if tensor is not None:
            mine.append((own.piece, own.name, tensor.detach()))
    told = [(piece, name, digest(tensor)) for piece, name, tensor in mine]
    holders: dict[ParameterPiece, dict[int, int]] = {}
    names: dict[ParameterPiece, str] = {}
    for rank, pieces in enumerate(of_all_ranks(told)):
        for piece, name, number in pieces:
            holders.setdefault(piece, {}).setdefault(rank, number)
            names[piece] = name
    tensors: dict[ParameterPiece, Tensor] = {}
    for piece, _, tensor in mine:
        tensors.setdefault(piece, tensor)
    different = sorted(
        (piece for piece, digests in holders.items() if len(set(digests.values())) > 1),
        key=sort_key,
    )
    return [
        ApartNote(
            what, names[piece], tuple(holders[piece]), _error(tensors.get(piece), holders[piece])
        )
        for piece in different
    ]


def _error(tensor: Tensor | None, holders: dict[int, int]) -> float:
    """The largest difference from the first holder's copy; known to every rank."""
    first, *others = holders
    rank = dist.get_rank()
    error = 0.0
    if tensor is not None and rank == first:
        for other in others:
            dist.send(tensor.contiguous(), dst=other)
    elif tensor is not None:
        expected = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.recv(expected, src=first)
        scale = expected.abs().max().item() or 1.0
        error = (tensor - expected).abs().max().item() / scale
    return max(of_all_ranks(error))
