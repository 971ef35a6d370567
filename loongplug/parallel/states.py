"""Parallel states: which module's groups, ranks and random numbers Megatron works with.

Megatron keeps one parallel layout per process in globals. Here each module of a model has its
own: the decoder's is the one that Megatron made at start-up (:func:`adopt_parallel_state`), those
of encoders are made beside it (:func:`create_parallel_state`), and
``with parallel_state_of(name):`` gives Megatron that module's until the block ends.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as tensor_parallel_random

from loongplug.parallel.layout import Layout
from loongplug.parallel.megatron_globals import Snapshot, load_start, part_random_numbers
from loongplug.platform.upstream_seams import rank_order_table

TEXT_DECODER = "text_decoder"
_BETWEEN_STAGES = 100  # seeds, as in Megatron
_NOWHERE = "no decoder"  # of ranks that the decoder has not: what Megatron has between modules

# Called after each switch with the names of the state that was left and the one now in use.
OnSwitch = Callable[[str, str], None]


@dataclass(frozen=True)
class _State:
    """A module's layout, and its snapshot on the ranks that the module has."""

    layout: Layout
    snapshot: Snapshot | None


class _ParallelStatesDict(dict[str, _State]):
    """Every module's state by the module's name, and which one Megatron has now."""

    def __init__(self) -> None:
        super().__init__()
        self.current: str | None = None
        self.gloo = False  # whether states have groups of gloo beside the others
        self.on_switch: OnSwitch | None = None

    def __missing__(self, name: str) -> _State:
        known = ", ".join(map(repr, self)) or "none"
        raise ValueError(f"there is no parallel state {name!r}: known are {known}.")

    def switch(self, name: str) -> None:
        """Give Megatron the state of ``name`` from now on; what the last one has become is kept.

        Ranks do not talk. Nearly free when ``name`` is in use already. Errors as
        :meth:`snapshot_of`.
        """
        before = self.current
        if name == before:
            return
        target = self.snapshot_of(name)
        assert before is not None  # there is a target, so one has been adopted
        source = self[before].snapshot
        assert source is not None
        source.save()
        target.load()
        self.current = name
        if self.on_switch is not None:
            self.on_switch(before, name)

    def snapshot_of(self, name: str) -> Snapshot:
        """The snapshot of a state that this rank has a part in.

        Raises:
            ValueError: there is no such state.
            RuntimeError: this rank has no part in it, or no state has been adopted yet.
        """
        if self.current is None:
            raise RuntimeError(
                f"there are no parallel states yet, so none of {name!r}: call "
                "adopt_parallel_state() after Megatron's initialization."
            )
        state = self[name]
        if state.snapshot is None:
            raise RuntimeError(
                f"rank {dist.get_rank()} has no part in {name!r}, which has ranks "
                f"{state.layout.ranks.start} to {state.layout.ranks.stop - 1}."
            )
        return state.snapshot


# The parallel states of this process, and the only thing in it that changes.
PARALLEL_STATES = _ParallelStatesDict()


def is_adopted() -> bool:
    """Whether there are states: whether :func:`adopt_parallel_state` was called."""
    return bool(PARALLEL_STATES)


def adopt_parallel_state() -> Layout:
    """Make what Megatron has initialized the decoder's state, and the current one; its layout.

    Every rank calls this once after ``initialize_model_parallel``; ranks do not talk.

    Raises ValueError where there are states already.
    """
    _require_none()
    layout = live_layout()
    PARALLEL_STATES[TEXT_DECODER] = _State(layout, Snapshot())
    PARALLEL_STATES.current = TEXT_DECODER
    PARALLEL_STATES.gloo = parallel_state._DATA_PARALLEL_GROUP_GLOO is not None
    return layout


def _require_none() -> None:
    if PARALLEL_STATES:
        raise ValueError(
            f"{PARALLEL_STATES.current!r} has been adopted already; further states are made by "
            "create_parallel_state()."
        )


def adopt_own_ranks(
    name: str, layout: Layout, *, gloo: bool, initialize: Callable[[], None]
) -> None:
    """As :func:`adopt_parallel_state`, for a module that has not all ranks of the world.

    ``initialize`` makes Megatron's parallel state for the ranks of ``layout``, which are the first
    ones, with groups of gloo beside the others if ``gloo`` is set. Collective over the world: every
    rank enters, since all make all groups. The other ranks have no state to be in until
    :func:`rest_in` gives them one.

    Raises:
        ValueError: there are states already.
    """
    _require_none()
    initialize()
    member = dist.get_rank() in layout.ranks
    PARALLEL_STATES[name] = _State(layout, Snapshot() if member else None)
    if not member:
        load_start()
        PARALLEL_STATES[_NOWHERE] = _State(layout, Snapshot())
    PARALLEL_STATES.current = name if member else _NOWHERE
    PARALLEL_STATES.gloo = gloo


def rest_in(name: str, *, dp: int) -> None:
    """On a rank that the decoder has not: Megatron works with this module's state from now on.

    But it counts samples by ``dp``, the decoder's data parallel size: one global batch is what all
    ranks go through together. ``with parallel_state_of(name):`` has the module's own.
    """
    assert PARALLEL_STATES.current == _NOWHERE, PARALLEL_STATES.current
    PARALLEL_STATES.switch(name)
    # The module's own generators are its snapshot's; Megatron seeds those of this state.
    part_random_numbers()
    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = dp
    PARALLEL_STATES[_NOWHERE] = _State(layout_of(name), Snapshot())
    PARALLEL_STATES.current = _NOWHERE


def create_parallel_state(
    name: str,
    layout: Layout,
    *,
    seed: int,
    timeout_minutes: float = 30,
    nccl_config_path: str | None = None,
) -> None:
    """Make the groups and the random numbers of another module; the current state stays.

    Collective over the world: every rank calls this in the same order with the same arguments,
    also the ranks that ``layout`` does not have. gloo groups are made beside the others where
    the current state has them.

    The random numbers depend on ``seed``, ``name`` and the rank's own stage, tensor and expert
    parallel coordinates in ``layout``, and on nothing of the decoder: ranks with equal
    coordinates draw the same, wherever they are.

    Raises:
        RuntimeError: nothing has been adopted yet.
        ValueError: the name is taken.
    """
    current = PARALLEL_STATES.current
    if current is None:
        raise RuntimeError(
            f"{name!r} has to be created beside an adopted state: call adopt_parallel_state() "
            "after Megatron's initialization."
        )
    if name in PARALLEL_STATES:
        raise ValueError(f"there is a parallel state {name!r} already: choose another name.")
    like = tensor_parallel_random._CUDA_RNG_STATE_TRACKER
    plain = tensor_parallel_random.CudaRNGStatesTracker
    kept = PARALLEL_STATES.snapshot_of(current)
    kept.save()
    in_order = rank_order_table(layout.order, first_rank=layout.first_rank)
    try:
        load_start()
        in_order.apply()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            nccl_communicator_config_path=nccl_config_path,
            distributed_timeout_minutes=timeout_minutes,
            create_gloo_process_groups=PARALLEL_STATES.gloo,
            rank_offset=layout.first_rank,
            local_world_size=layout.world_size,
        )
        snapshot = None
        if dist.get_rank() in layout.ranks:
            stage = layout.coordinates(dist.get_rank()).pp
            # Modules of one seed draw different numbers; Megatron adds small ones for coordinates.
            own = seed + 1_000_003 * (zlib.crc32(name.encode()) % 1000)
            own += _BETWEEN_STAGES * stage
            torch.manual_seed(own)
            tensor_parallel_random.model_parallel_cuda_manual_seed(
                own,  # for a tracker of the decoder's kind
                te_rng_tracker=like is not None and not isinstance(like, plain),
                inference_rng_tracker=getattr(like, "is_inference_rng_tracker", False),
                use_cudagraphable_rng=getattr(like, "use_cudagraphable_rng", False),
                force_reset_rng=True,
            )
            snapshot = Snapshot()
    finally:
        in_order.undo()
        kept.load()
    PARALLEL_STATES[name] = _State(layout, snapshot)


@contextmanager
def parallel_state_of(name: str) -> Iterator[None]:
    """``with parallel_state_of(name):`` runs the block in that state, and always switches back.

    Ranks do not talk. Errors as :meth:`_ParallelStatesDict.snapshot_of`.
    """
    before = PARALLEL_STATES.current
    PARALLEL_STATES.switch(name)
    assert before is not None
    try:
        yield
    finally:
        PARALLEL_STATES.switch(before)


def layout_of(name: str) -> Layout:
    """The layout of a state, on every rank. Raises ValueError for an unknown name."""
    return PARALLEL_STATES[name].layout


def decoder_layout() -> Layout:
    """The decoder's layout, on every rank; Megatron's as it is now, where none is adopted."""
    return layout_of(TEXT_DECODER) if is_adopted() else live_layout()


def live_layout() -> Layout:
    """The sizes of Megatron's parallel state as it is now, in Megatron's default order of ranks."""
    return Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
    )


def process_groups(name: str) -> ProcessGroupCollection:
    """The groups of a state, every field set (None where Megatron has no such group).

    Errors as :func:`parallel_state_of`.
    """
    with parallel_state_of(name):
        return ProcessGroupCollection.use_mpu_process_groups()


def destroy_parallel_states() -> None:
    """Forget all states, in that of the decoder; process groups live on.

    What Megatron has then is the adopted state as it has become. Does nothing without states.
    """
    if PARALLEL_STATES:
        decoder, *others = PARALLEL_STATES
        PARALLEL_STATES.switch(_NOWHERE if _NOWHERE in others else decoder)
        PARALLEL_STATES.clear()
        PARALLEL_STATES.current = None
