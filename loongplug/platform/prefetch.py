"""Memory of the device that is on the host for a while, and comes back before it is needed."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor


class Copies:
    """A queue of copies between device and host, beside the computation of the caller's stream.

    On a CPU, what CUDA's names stand for does all work in the order given. Nothing here makes the
    host wait, and neither queue waits for the other but by ``follow`` and ``wait``. The memory of
    a copy's ends has to stay what it is until the computation has waited for a mark behind it.
    """

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """Made for the first copy: before Megatron starts, every rank's current GPU is GPU 0."""
        return torch.cuda.Stream()

    def host_like(self, tensor: Tensor) -> Tensor:
        """Pinned memory of the shape and dtype of ``tensor``, reused only when copies are done."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def follow(self) -> None:
        """Copies from now on start when the computation given so far is done."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; one of ``target`` and ``source`` is on the host."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` is reused only after all copies that are in the queue now."""
        tensor.record_stream(self._stream)

    def mark(self) -> Any:
        """The place in the queue behind what it has been given so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        """Computation from now on starts when the queue has come to ``mark``."""
        torch.cuda.current_stream().wait_event(mark)


@dataclass(kw_only=True, eq=False)
class Movable:
    """A tensor that is on the device, on the host, or on its way.

    ``where`` is its device, also while ``device`` is None. ``host`` is kept from one way to the
    next where it is given. ``zeros``: it comes back as zeros, and nothing is copied. ``unchanged``:
    the host has its content already, and nothing is copied there.
    """

    device: Tensor | None
    where: torch.device
    host: Tensor | None = None
    zeros: bool = False
    unchanged: bool = False

    def free(self) -> None:
        """Let go of the device's memory."""
        self.device = None

    def allocate(self) -> Tensor:
        """Memory on the device again; its content comes later."""
        assert self.host is not None
        self.device = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.where)
        return self.device


@dataclass(frozen=True, kw_only=True)
class SavedView:
    """Stands in the graph for a saved tensor; ``storage`` is as bytes, [nbytes] uint8."""

    storage: Movable
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor, of its storage's bytes on the device."""
        assert self.storage.device is not None, "its storage was not sent for"
        found = torch.empty(0, dtype=self.dtype, device=self.storage.where)
        return found.set_(
            self.storage.device.untyped_storage(), self.offset, self.size, self.stride
        )


def saved_view(
    tensor: Tensor, known: dict[int, Movable], *, made: Callable[..., Movable] = Movable
) -> SavedView:
    """For ``tensor``; its storage is entered in ``known``, by its address, if it is a new one.

    It is ``made`` of its bytes (``device``) and of where these are.
    """
    storage = tensor.untyped_storage()
    if storage._cdata not in known:
        nbytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        known[storage._cdata] = made(device=nbytes, where=tensor.device)
    return SavedView(
        storage=known[storage._cdata],
        dtype=tensor.dtype,
        size=tensor.size(),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )


# Copies to the host are under way, while the device's memory is there; copies to the device are.
_State = Literal["leaving", "away", "coming"]


@dataclass(kw_only=True)
class _Lot:
    items: Sequence[Movable]
    state: _State
    mark: Any  # behind its copies


class PrefetchQueue:
    """Lots of memory that leave for the host and come back, by names that the caller gives them.

    Every method only queues: copies run beside the computation (:class:`Copies`), and both ends
    of one live until the computation has waited for it. In a lot's life, in this order:
    :meth:`leave`, :meth:`let_go`, :meth:`send_for`, :meth:`take`.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._lots: dict[Hashable, _Lot] = {}

    def leave(self, lots: Mapping[Hashable, Sequence[Movable]]) -> None:
        """Lots set out; until :meth:`let_go` they may be used, but not changed."""
        assert not self._lots.keys() & lots.keys(), "it has left already"
        self._copies.follow()
        for items in lots.values():
            for each in items:
                if each.zeros or each.unchanged:
                    continue
                assert each.device is not None
                if each.host is None:
                    each.host = self._copies.host_like(each.device)
                self._copies.copy(each.host, each.device)
        mark = self._copies.mark()
        for name, items in lots.items():
            self._lots[name] = _Lot(items=items, state="leaving", mark=mark)

    def let_go(self, *names: Hashable) -> None:
        """Free the device's memory of those that leave."""
        leaving = self._of(names, "leaving")
        self._wait(leaving)
        for lot in leaving:
            for each in lot.items:
                each.free()
            lot.state = "away"

    def send_for(self, *names: Hashable) -> None:
        """Lots that are away set out on their way back; lots that have not left yet stay."""
        for name in names:
            lot = self._lots.get(name)
            if lot is not None and lot.state == "leaving":
                # Nobody waits for its copies, and its memory may soon be given to others.
                for each in lot.items:
                    if each.device is not None and not each.zeros:
                        self._copies.keep(each.device)
                del self._lots[name]
        away = self._of(names, "away")
        if not away:
            return
        coming = [(each, each.allocate()) for lot in away for each in lot.items]
        self._copies.follow()  # the memory may be in use until then
        for each, device in coming:
            if each.zeros:
                device.zero_()
                continue
            assert each.host is not None
            self._copies.copy(device, each.host)
        mark = self._copies.mark()
        for lot in away:
            lot.state, lot.mark = "coming", mark

    def take(self, *names: Hashable) -> dict[Hashable, Sequence[Movable]]:
        """Lots are there from now on, and no longer this queue's."""
        self.send_for(*names)
        self._wait(self._of(names, "coming"))
        return {name: self._lots.pop(name).items for name in names if name in self._lots}

    def _of(self, names: Sequence[Hashable], state: _State) -> list[_Lot]:
        lots = (self._lots.get(name) for name in names)
        return [lot for lot in lots if lot is not None and lot.state == state]

    def _wait(self, lots: Sequence[_Lot]) -> None:
        """Once for each mark: lots that set out together have one."""
        for mark in {id(lot.mark): lot.mark for lot in lots}.values():
            self._copies.wait(mark)
