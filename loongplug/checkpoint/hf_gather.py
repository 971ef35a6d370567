"""Whole tensors under their Hugging Face names, put together from all ranks one by one."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongplug.checkpoint.common_errors import together
from loongplug.checkpoint.parameter_holders import (
    Holders,
    ParameterPiece,
    all_holders,
    held_parameters,
    own_rank,
)
from loongplug.models.hf_mapping import Bundle, MappedParameter, Mapping, Source, Where
from loongplug.models.hf_slices import local_shape, parts_of_local

What = Literal["weight", "grad"] | Callable[[nn.Parameter], Tensor | None]
WeightOf = Callable[[nn.Parameter], Tensor]
OnBytes = Callable[[int, int], None]  # bytes dealt with so far, bytes in all


def ignore_bytes(done: int, total: int) -> None:
    """For callers who show nothing."""


def loaded_weight(parameter: nn.Parameter) -> Tensor:
    """The values of a parameter that has them."""
    return parameter.data


class WholeTensors:
    """The weights or gradients of a model that is spread over ranks, by Hugging Face name.

    A gradient is ``main_grad`` where Megatron keeps one, else ``grad``; parameters without are
    left out. A distributed optimizer leaves each data-parallel rank only its share of
    ``main_grad`` reduced: gather gradients without one, or with a single data-parallel rank.
    Anything else that a parameter has in its own shape and dtype is gathered by a function.

    Of the ranks that hold the same slice, the first gives it. Collective: the default group, in
    the constructor and in :meth:`collect`.
    """

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        mapping: Mapping,
        *,
        what: What = "weight",
        weight_of: WeightOf = loaded_weight,
    ) -> None:
        """Learn which ranks hold which pieces; ValueError on all ranks where a weight has none.

        ``weight_of`` is asked for a parameter's values when they are due, once or more.
        """
        with together():
            held = held_parameters(model_chunks, mapping)
        named = {"weight": weight_of, "grad": gradient}
        self._value_of = what if callable(what) else named[what]
        if what != "weight":
            held = [own for own in held if self._value_of(own.parameter) is not None]
        self._parameters = {own.piece: own.parameter for own in held}
        self._device = next(model_chunks[0].parameters()).device
        holders, dtypes = all_holders(held)
        self._holders, self._dtypes = holders, dtypes
        self._pieces: dict[tuple[int, int | None, int | None], list[ParameterPiece]] = {}
        for piece in holders:
            apart = piece.expert if mapping.rows[piece.row].experts_apart else None
            self._pieces.setdefault((piece.row, piece.layer, apart), []).append(piece)
        self.bundles = [bundle for bundle in mapping.bundles() if self._of(bundle)]
        if what == "weight":
            _require_whole(mapping, holders)

    def _of(self, bundle: Bundle) -> list[ParameterPiece]:
        return self._pieces.get((bundle.number, bundle.layer, bundle.expert), [])

    def dtype(self, bundle: Bundle) -> torch.dtype:
        """The dtype of the bundle's tensors."""
        return self._dtypes[self._of(bundle)[0]]

    def first_holder(self, bundle: Bundle) -> int:
        """The global rank that has the bundle's first slice."""
        return self._holders[self._of(bundle)[0]][0]

    def collect(
        self, destination: Callable[[Bundle], int], *, on_bytes: OnBytes = ignore_bytes
    ) -> Iterator[tuple[Bundle, Source, Tensor]]:
        """Put the tensors together one after the other, each on the rank ``destination`` gives.

        Every rank must run the iterator to its end; it yields a bundle, one of its sources and
        that source's tensor, on the destination only.
        """
        done, total = 0, sum(self._nbytes(b, s) for b in self.bundles for s in b.sources)
        for bundle in self.bundles:
            target = destination(bundle)
            for index, source in enumerate(bundle.sources):
                if target == own_rank():
                    yield bundle, source, self._put_together(bundle, index)
                else:
                    self._send(bundle, index, target=target)
                done += self._nbytes(bundle, source)
                on_bytes(done, total)

    def _nbytes(self, bundle: Bundle, source: Source) -> int:
        return self.dtype(bundle).itemsize * prod(source.shape)

    def _put_together(self, bundle: Bundle, index: int) -> Tensor:
        """The tensor with what this rank has of it and what others send, a message of each."""
        if (held := self._as_it_is(bundle, index)) is not None:
            return held
        shape, dtype = bundle.sources[index].shape, self.dtype(bundle)
        # Of experts that are frozen one by one, some have no gradient.
        whole = torch.zeros(shape, dtype=dtype, device=self._device)
        awaited: dict[int, list[Tensor]] = {}  # where each rank's message goes, in its order
        for piece, entry in self._pieces_and_entries(bundle):
            holder = self._holders[piece][0]
            if holder == own_rank():
                for where, part in _parts(entry, self._local(piece), piece, index):
                    whole[where].copy_(part)
            else:  # of which this rank knows the shape
                shapes = torch.empty(local_shape(bundle.row, tp=piece.parts), device="meta")
                places = [whole[where] for where, _ in _parts(entry, shapes, piece, index)]
                awaited.setdefault(holder, []).extend(places)
        for holder, places in sorted(awaited.items()):
            sizes = [place.numel() for place in places]
            message = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            dist.recv(message, src=holder)
            for place, part in zip(places, message.split(sizes), strict=True):
                place.copy_(part.view(place.shape))
        return whole

    def _as_it_is(self, bundle: Bundle, index: int) -> Tensor | None:
        """The tensor where this rank has it in one piece, and no copy is needed."""
        pieces = list(self._pieces_and_entries(bundle))
        if len(pieces) > 1 or self._holders[pieces[0][0]][0] != own_rank():
            return None
        ((piece, entry),) = pieces
        parts = _parts(entry, self._local(piece), piece, index)
        shape = bundle.sources[index].shape
        return parts[0][1] if len(parts) == 1 and parts[0][1].shape == shape else None

    def _send(self, bundle: Bundle, index: int, *, target: int) -> None:
        parts = [
            part.flatten()
            for piece, entry in self._pieces_and_entries(bundle)
            if self._holders[piece][0] == own_rank()
            for _, part in _parts(entry, self._local(piece), piece, index)
        ]
        if parts:
            dist.send(parts[0] if len(parts) == 1 else torch.cat(parts), dst=target)

    def _local(self, piece: ParameterPiece) -> Tensor:
        value = self._value_of(self._parameters[piece])
        assert value is not None
        return value

    def _pieces_and_entries(
        self, bundle: Bundle
    ) -> Iterator[tuple[ParameterPiece, MappedParameter]]:
        entries = {entry.expert: entry for entry in bundle.entries()}
        return ((piece, entries[piece.expert]) for piece in self._of(bundle))


def _parts(
    entry: MappedParameter, local: Tensor, piece: ParameterPiece, index: int
) -> list[tuple[Where, Tensor]]:
    return parts_of_local(entry, local, source=index, rank=piece.part, tp=piece.parts)


def _require_whole(mapping: Mapping, holders: Holders) -> None:
    parts = Counter((piece.row, piece.layer, piece.expert) for piece in holders)
    wanted = {(piece.row, piece.layer, piece.expert): piece.parts for piece in holders}
    missing = [
        entry.name
        for entry in mapping.entries()
        if parts[key := (entry.number, entry.layer, entry.expert)] != wanted.get(key)
    ]
    if missing:
        raise ValueError(f"No rank has the whole of {', '.join(missing)}.")


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """``main_grad`` where Megatron keeps one, else ``grad``."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad
