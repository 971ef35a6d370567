"""Large activations of decoder layers on the host between their forward and their backward."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.platforms import Platform
from loongplug.platform.prefetch import Movable, PrefetchQueue, SavedView, saved_view
from loongplug.schedule.tensor_names import PLACES


class TensorOffload:
    """Named tensors of all layers of a rank's chunks, as far as a backward needs them.

    They leave when their layer's forward is done, have left when the next layer's is, and are sent
    for when the layer behind theirs begins its backward. Layers of one chunk go backward in turn;
    what a chunk's backward is followed by is taken from the step before, since each step has the
    same order. A layer whose backward comes before it has left stays.

    Whole storages travel, each once, however many tensors of it were named or saved. What has
    fewer than ``least`` bytes, or another name than those of ``names``, stays where it is.
    """

    def __init__(self, *, names: Collection[str], platform: Platform, least: int) -> None:
        self.names = frozenset(names)
        self.release = platform.release
        self.least = least
        self._queue = PrefetchQueue(platform.copies())
        self._now: LayerTensors | None = None
        self._leaving: LayerTensors | None = None
        self._open: set[LayerTensors] = set()
        self._begun = 0  # passes of this step
        self._order: list[int] = []  # in which they went backward so far
        self._passes: dict[int, list[LayerTensors]] = {}  # with something away, by number
        self._followers: dict[int, int] = {}  # pass by pass, of the step before

    def begin_pass(self, *, in_nodes: bool = False) -> Callable[[], "LayerTensors"]:
        """A microbatch enters a chunk; what is given is called for each layer, in their order.

        ``in_nodes``: by nodes of a schedule, which keep what they were given for the place of its
        gradient; its memory is given back under their hands.
        """
        if not self._open:  # a new step; or the one before it in a step that goes one by one
            self._followers = dict(zip(self._order, self._order[1:], strict=False))
            self._begun, self._order, self._passes = 0, [], {}
        self._begun += 1
        return partial(LayerTensors, self, self._begun - 1, in_nodes=in_nodes)

    def expect(self, order: Sequence[int]) -> None:
        """Before a step: the numbers of its passes, in the order in which they will go backward."""
        self._order = list(order)

    def name(self, name: str, tensor: Tensor) -> None:
        """What passes by in the forward that is under way, if one is."""
        if self._now is not None:
            self._now.passes(name, tensor)

    @contextmanager
    def within(self, layer: "LayerTensors") -> Iterator[None]:
        """Inside, what is named is the layer's."""
        before, self._now = self._now, layer
        try:
            yield
        finally:
            self._now = before

    def leave(self, layer: "LayerTensors", tensors: Sequence[Movable], *, number: int) -> None:
        """The layer's forward is done, and ``tensors`` are what it lets go of."""
        if self._leaving is not None:
            self._queue.let_go(self._leaving)
        self._open.add(layer)
        self._passes.setdefault(number, []).append(layer)
        self._queue.leave({layer: tensors})
        self._leaving = layer

    def bring(self, layer: "LayerTensors", *, number: int) -> None:
        """The layer's backward begins: its tensors are there, and the next layer's on their way."""
        if layer not in self._open:
            return
        self._open.remove(layer)
        if number not in self._order:
            self._order.append(number)
        self._queue.take(layer)
        follower = self._behind(layer, number)
        if follower is not None:
            self._queue.send_for(follower)

    def _behind(self, layer: "LayerTensors", number: int) -> "LayerTensors | None":
        layers = self._passes[number]
        layers.remove(layer)
        if not layers:
            del self._passes[number]
            layers = self._passes.get(self._followers.get(number, -1), [])
        return layers[-1] if layers else None


class LayerTensors:
    """What one layer's forward for one microbatch has saved."""

    def __init__(self, offload: TensorOffload, number: int, *, in_nodes: bool) -> None:
        self._offload = offload
        self._number = number
        self._made = partial(_LayerStorage, release=offload.release if in_nodes else None)
        # A weak reference keeps a storage's address from being another's.
        self._named: dict[int, StorageWeakRef] = {}
        self._saved: dict[int, Movable] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, the layer's forward or a part of it runs, as often as it has parts."""
        with self._offload.within(self), saved_tensors_hooks(self._pack, self._unpack):
            yield

    def forward_done(self) -> None:
        """All parts have run: what is named and was saved leaves."""
        leaving = [
            saved
            for address, saved in self._saved.items()
            if address in self._named and _nbytes(saved)  # schedules free what they hand on
        ]
        self._saved, self._named = {}, {}
        if leaving:
            self._offload.leave(self, leaving, number=self._number)

    def passes(self, name: str, tensor: Tensor) -> None:
        """Its storage is to leave, if it is named, saved and large enough."""
        storage = tensor.untyped_storage()
        if name in self._offload.names and storage.nbytes() >= self._offload.least:
            self._named[storage._cdata] = StorageWeakRef(storage)

    def _pack(self, tensor: Tensor) -> SavedView | Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._offload.least:
            return tensor.detach()
        return saved_view(tensor, self._saved, made=self._made)

    def _unpack(self, packed: SavedView | Tensor) -> Tensor:
        self._offload.bring(self, number=self._number)
        if isinstance(packed, Tensor):
            return packed
        found = packed.tensor()
        _also_used_here(found)
        return found


@dataclass(kw_only=True, eq=False)
class _LayerStorage(Movable):
    """``release``: others may hold tensors of the storage, whose memory is given back anyway."""

    release: Callable[[torch.UntypedStorage], None] | None

    def free(self) -> None:
        """Let go of the device's memory, of which the copy was made."""
        assert self.device is not None
        _also_used_here(self.device)
        if self.release is not None:
            self.release(self.device.untyped_storage())
        super().free()


def _also_used_here(tensor: Tensor) -> None:
    """Its memory may be another stream's, which may not have it back before this one is done."""
    tensor.record_stream(torch.cuda.current_stream())


def _nbytes(saved: Movable) -> int:
    assert saved.device is not None
    return saved.device.untyped_storage().nbytes()


def offload_layers(chunk: MultimodalModel, offload: TensorOffload) -> None:
    """From now on the decoder layers' forward lets go of the tensors that ``offload`` names.

    Raises:
        ValueError: no layer of the chunk has such a tensor.
    """
    decoder = chunk.text_decoder.decoder
    for name in sorted(offload.names):
        watched = [_watch(layer, name, offload) for layer in decoder.layers]
        if watched and not any(watched):
            raise ValueError(
                f"--offload-tensors {name}: no decoder layer has a tensor of that name (norms that "
                "TransformerEngine fuses into linears give none, and dense layers have no experts);"
                " drop it"
            )
    next_layer: list[Callable[[], LayerTensors]] = []  # of the pass that has begun

    def begin(module: nn.Module, args: Any) -> None:
        next_layer[:] = [offload.begin_pass()]

    def leaving(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def with_leaving(*args: Any, **kwargs: Any) -> Any:
            tensors = next_layer[0]()
            with tensors.forward():
                output = forward(*args, **kwargs)
            tensors.forward_done()
            return output

        return with_leaving

    decoder.register_forward_pre_hook(begin)
    for layer in decoder.layers:
        layer.forward = leaving(layer.forward)


def _watch(layer: nn.Module, name: str, offload: TensorOffload) -> bool:
    """Tell ``offload`` of the tensors of a name, and whether the layer has such."""
    wanted, is_given = PLACES[name]

    def given(module: nn.Module, args: tuple[Any, ...]) -> None:
        offload.name(name, args[0])

    def gives(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        offload.name(name, output[0] if isinstance(output, tuple) else output)

    found = False
    for path, module in layer.named_modules():
        ends = wanted.startswith(".") and path.startswith("mlp.") and path.endswith(wanted)
        if not ends and path != wanted:
            continue
        if is_given:
            module.register_forward_pre_hook(given)
        elif isinstance(module, IdentityOp):  # a norm that is fused into the linear behind it
            continue
        else:
            module.register_forward_hook(gives)
        found = True
    return found
