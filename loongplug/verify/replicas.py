"""Whether all ranks that hold a copy of the same slice, for whatever reason, hold the same copy."""

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
    mine: dict[ParameterPiece, tuple[str, Tensor]] = {}
    for own in held_parameters(chunks, mapping):
        tensor = select(own.parameter)
        if tensor is not None:
            mine.setdefault(own.piece, (own.name, tensor.detach()))
    told = {piece: (name, digest(tensor)) for piece, (name, tensor) in mine.items()}
    holders: dict[ParameterPiece, dict[int, tuple[str, int]]] = {}
    for rank, pieces in enumerate(of_all_ranks(told)):
        for piece, number in pieces.items():
            holders.setdefault(piece, {})[rank] = number
    different = [
        piece for piece, found in holders.items() if len({n for _, n in found.values()}) > 1
    ]
    notes = []
    for piece in sorted(different, key=sort_key):
        (name, _), *_ = holders[piece].values()
        error = _error(mine[piece][1] if piece in mine else None, [*holders[piece]])
        notes.append(ApartNote(what, name, tuple(holders[piece]), error))
    return notes


def _error(tensor: Tensor | None, holders: Sequence[int]) -> float:
    """The largest difference from the first holder's copy; known to every rank."""
    first, *others = holders
    error = 0.0
    if tensor is not None and dist.get_rank() == first:
        for other in others:
            dist.send(tensor.contiguous(), dst=other)
    elif tensor is not None:
        expected = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.recv(expected, src=first)
        scale = expected.abs().max().item() or 1.0
        error = (tensor - expected).abs().max().item() / scale
    return max(of_all_ranks(error))
