"""Bytes of live tensors while code runs, on real tensors or on those of the meta device."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Answer = Callable[..., Any]

# Regions, as tables call them.
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradient buffers", "optimizer state"
ENCODER, DECODER = "encoder activations", "decoder activations"
INPUT, FEATURES, FEATURE_GRADIENTS = "media", "features", "feature gradients"
STATES, STATE_GRADIENTS = "states between stages", "gradients of these states"
PIPELINE = "pipeline buffers"
TRANSIENT = "transient"


class Tape(TorchDispatchMode):
    """Follows the storages that operations make while it is entered, until they are freed.

    A storage counts once, however many tensors share it, for the ``region`` in which it was made.
    Tensors made before are none of its business. ``answers`` stand in for operations, by name:
    what the meta device cannot tell, such as how many elements of a mask are set.

    ``peak`` is what there was at the fullest moment, by region, and ``when`` what was being
    ``doing`` then; ``highest`` has of each region the most that there was in a :meth:`sample`.
    """

    def __init__(self, *, region: str, answers: Mapping[Any, Answer] | None = None) -> None:
        super().__init__()
        self._answers = answers or {}
        self._known: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._region = region
        self.live: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.highest: Counter[str] = Counter()
        self.doing = self.when = ""

    @property
    def total(self) -> int:
        return self.live.total()

    @property
    def most(self) -> int:
        """The bytes that were live at the peak since the last :meth:`restart`."""
        return sum(self.peak.values())

    def restart(self) -> None:
        self.peak = dict(self.live)

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Inside, storages are made for ``name``."""
        before, self._region = self._region, name
        try:
            yield
        finally:
            self._region = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = NotImplemented
        if func in self._answers:
            result = self._answers[func](*args, **(kwargs or {}))
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        made = _storages(result)
        if not made.keys() <= self._known.keys():
            before = _storages((args, kwargs))
            for key, storage in made.items():
                if key not in before:  # else a view of something that was there before
                    self._count(storage)
        return result

    def see(self, tensor: Tensor) -> None:
        self._count(tensor.untyped_storage())

    def belongs(self, tensor: Tensor, region: str, *, of: str | None = None) -> None:
        """A storage that counts (for the region ``of``) counts for ``region`` from now on."""
        key = tensor.untyped_storage()._cdata
        if key not in self._known:
            return
        reference, before, nbytes = self._known[key]
        if of in (None, before):
            self._known[key] = reference, region, nbytes
            self.take(before, nbytes)
            self.add(region, nbytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or storage.nbytes() == 0:
            return
        region, nbytes = self._region, storage.nbytes()
        reference = weakref.ref(storage, lambda _: self._drop(key))
        self._known[key] = (reference, region, nbytes)
        self.add(region, nbytes)

    def given_back(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as freed, though tensors on it live on."""
        if storage._cdata in self._known:
            self._drop(storage._cdata)

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Inside, storages that are resized count as what they are now.

        No operation does this, so that entering the tape alone does not see it.
        """
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            known = self._known.get(storage._cdata)
            if known is not None:
                reference, region, before = known
                self._known[storage._cdata] = (reference, region, storage.nbytes())
                self.add(region, storage.nbytes() - before)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def _drop(self, key: int) -> None:
        _, region, nbytes = self._known.pop(key)
        self.take(region, nbytes)

    def add(self, region: str, nbytes: int) -> None:
        self.live[region] += nbytes
        if self.total > self.most:
            self.peak, self.when = dict(self.live), self.doing

    def take(self, region: str, nbytes: int) -> None:
        self.live[region] -= nbytes
        assert self.live[region] >= 0, (region, self.live)

    def turn(self, region: str, *, more: int, most: int) -> None:
        """Work behind which there is so much ``more`` than before, and ``most`` within it.

        What stays is entered before the work, what goes is there until it is done.
        """
        self.add(region, max(0, more))
        self.work(most - max(0, more))
        self.take(region, max(0, -more))

    def work(self, nbytes: int) -> None:
        """Count so many bytes for a moment, beside all else."""
        self.add(TRANSIENT, nbytes)
        self.take(TRANSIENT, nbytes)

    def sample(self) -> None:
        """Take note of what there is between two operations."""
        self.highest |= self.live


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return {each._cdata: each for each in (tensor.untyped_storage() for tensor in tensors)}


class FlashAttention(TorchFunctionMode):
    """Attention that keeps what flash kernels keep, also on the meta device.

    There torch would take the composed form, which holds matrices of sequence by sequence.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as torch, but for scaled_dot_product_attention without dropout or a mask."""
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention or kwargs.get("dropout_p"):
            return func(*args, **kwargs)
        query, key, value = args
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            key,
            value,
            0.0,
            kwargs.get("is_causal", False),
            scale=kwargs.get("scale"),
        )[0]
