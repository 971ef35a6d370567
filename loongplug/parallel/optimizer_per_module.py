"""One optimizer per module, chained; what checkpoints have of each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from loongplug.parallel.module_ddp import wrapper_of_nothing
from loongplug.parallel.parameter_groups import SavedRates, groups_to_load, rate_overrides
from loongplug.parallel.states import PARALLEL_STATES, decoder_layout, layout_of
from loongplug.platform import current_platform

# The fp32 copies of bf16 parameters: by their places in groups, and as Megatron lists them.
_MAIN, _LISTED = "main_params", "fp32_from_fp16_params"


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Adam's step, which all parameters share; ``of_tensors`` where each has a copy (torch's)."""

    value: float
    of_tensors: bool


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """A part that lies on some ranks alone, as all ranks know it.

    The first of its ranks, its number of optimizers, and whether any of them has a state.
    """

    first_rank: int
    optimizers: int
    trains: bool


class OptimizerPerModule(ChainedOptimizer):
    """The optimizers of all parts, of which those where every rank is frozen have no state.

    Upstream's chain asks each of them for its state. Here they keep their numbers, by which
    checkpoints know optimizers, and are passed over.

    ``saved_rates`` has the learning rates of all groups here and in the checkpoint that was
    loaded. Groups keep this run's; whoever loads the scheduler knows which are to be taken.

    A part can lie on some ranks alone. What the others have to know of its optimizers, the first of
    these ranks tells them by a sum over the world, to which nobody else adds: so that it is exact,
    and also told where it is not a number. Ranks of the part know it already, and do not wait.

    ``before_update`` is called with the norm of all gradients, before any weight changes, and says
    whether any shall. The host has just waited for that norm, so that what it asks the device for
    is there.
    """

    def __init__(
        self, of_part: dict[str, list[Any]], *, not_everywhere: Mapping[str, "OnRanks"]
    ) -> None:
        """``of_part``: by the part's name, those of this rank; none where the part lies elsewhere.

        ``not_everywhere`` are the parts that lie on some ranks alone, the same on every rank.
        """
        super().__init__([each for optimizers in of_part.values() for each in optimizers])
        self.of_part = of_part
        # Megatron asks it before it saves and loads, which all ranks do together.
        self.is_stub_optimizer &= not any(part.trains for part in not_everywhere.values())
        self._tells: set[int] = set()
        self._told = bool(not_everywhere)
        self._numbered: dict[int, Any] = {}  # those of this rank, as checkpoints number them
        self._count = 0
        for name, optimizers in of_part.items():
            own = dict(enumerate(optimizers, start=self._count))
            self._numbered |= own
            if name not in not_everywhere:
                self._count += len(own)
                continue
            part = not_everywhere[name]
            assert len(own) in (0, part.optimizers), (name, part)
            self._count += part.optimizers
            if dist.get_rank() == part.first_rank:
                self._tells |= own.keys()
        self.saved_rates: list[SavedRates] = []
        self.before_update: Callable[[float], bool] = lambda norm: True
        self._updates = True

    def get_grad_norm(self) -> float:
        """As upstream's, which each step asks for, and told to ``before_update``."""
        norm: float = self._norm_over_the_world() if self._told else super().get_grad_norm()
        self._updates = self.before_update(norm)
        return norm

    def step_with_ready_grads(self) -> bool:
        """As upstream's; to Megatron, a step in which no weight shall change is a skipped one."""
        return self._updates and bool(super().step_with_ready_grads())

    def prepare_grads(self) -> bool:
        """As upstream's; what is not finite in any part is found on every rank."""
        found: bool = super().prepare_grads()
        # Without a scale, none of them looks.
        if self._told and (self.config.fp16 or self.config.loss_scale):
            told = self._told_to_all({number: float(found) for number in self._numbered})
            found = found or any(told)
        return found

    def _norm_over_the_world(self) -> float:
        """The root of the sum of the squares of all optimizers' norms, those of other ranks too."""
        own = {number: float(each.get_grad_norm()) for number, each in self._numbered.items()}
        return math.sqrt(sum(norm**2 for norm in self._told_to_all(own)))

    def _told_to_all(self, own: Mapping[int, float]) -> list[float]:
        """What is known of each optimizer, by its number, from the ranks that have it.

        Collective over the world; all ranks that have an optimizer know the same of it. On a rank
        that has all of them, the host does not wait.
        """
        told = torch.zeros(self._count, dtype=torch.float64, device=current_platform().device)
        for number in self._tells:
            told[number].fill_(own[number])
        dist.all_reduce(told)
        if len(own) == self._count:
            return [own[number] for number in range(self._count)]
        return [own.get(number, value) for number, value in enumerate(told.tolist())]

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """As upstream's, without those that have no state: only who clips asks, which they do not.

        Where an encoder trains beside a frozen decoder, these are ranks of the first stage alone.
        """
        return any(
            each.has_grad_norm_group(grad_norm_group) for each in self._with_state().values()
        )

    def largest_rate(self) -> float | None:
        """The largest learning rate of the groups of this rank; None where nothing trains."""
        groups = [g for each in self._with_state().values() for g in each.optimizer.param_groups]
        return max((group["lr"] for group in groups), default=None)

    def _with_state(self) -> dict[int, Any]:
        return {
            number: optimizer
            for number, optimizer in self._numbered.items()
            if not optimizer.is_stub_optimizer
        }

    def _synchronize_steps(self) -> Any:
        return ChainedOptimizer._synchronize_steps(
            SimpleNamespace(chained_optimizers=list(self._with_state().values()))
        )

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
    ) -> dict[int, Any]:
        """As upstream's, by number. Collective over each part's groups; to save, over all ranks.

        The first rank alone saves what is not a tensor, so it must have what only others know. Some
        of Megatron's lists of groups differ between ranks and runs: there tensors are kept by their
        places, and groups are asked for whole.
        """
        self._synchronize_steps()
        metadata = kwargs.get("metadata") or {}
        kind = metadata.get("distrib_optim_sharding_type")
        formats = (None, *DistributedOptimizer.checkpoint_fully_reshardable_formats)
        named = kind in formats and metadata.get("chained_optim_avoid_prefix", False)
        step = None if is_loading else self._common_step()
        states: dict[int, Any] = {}
        for number, optimizer in self._with_state().items():
            state = optimizer.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
            states[number] = state
            inner = state.get("optimizer", state)
            if isinstance(inner, ShardedObject):
                pass  # each model parallel rank's own
            elif isinstance(optimizer, DistributedOptimizer):
                _set_steps(inner["param_groups"], step)
            else:
                _by_places(state)
                _set_steps(inner["param_groups"], step)
                if step is not None and step.of_tensors:
                    inner["state"].setdefault("common_step", torch.tensor(step.value))
                if is_loading:
                    del inner["param_groups"]
            if not named:
                add_prefix_for_sharding(state, f"chained_{number}.")
        if self._told and not is_loading:
            self._tell_the_first_rank(states)
        return states

    def _tell_the_first_rank(self, states: dict[int, Any]) -> None:
        """What is not a tensor of parts that lie elsewhere. Collective over the world."""
        everyone: list[dict[int, Any]] = [{}] * dist.get_world_size()
        mine = {number: _common(states[number]) for number in self._tells & states.keys()}
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            for told in everyone:
                states.update({n: state for n, state in told.items() if n not in states})

    def _common_step(self) -> _Step | None:
        """The step, also on ranks without parameters; None before the first. Collective: all."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, next(self._own_steps(), None))
        return next((step for step in everyone if step is not None), None)

    def _own_steps(self) -> Iterator[_Step]:
        for optimizer in self._with_state().values():
            # First those of tensors: beside them, a group has what was loaded, which nobody counts.
            for parameter, state in optimizer.optimizer.state.items():
                if isinstance(parameter, torch.Tensor) and "step" in state:
                    yield _Step(value=float(state["step"]), of_tensors=True)
            for group in optimizer.optimizer.param_groups:
                if group["params"] and "step" in group:
                    yield _Step(value=float(group["step"]), of_tensors=False)

    def load_state_dict(self, state_dict: Any) -> None:
        """Each optimizer's own by its number; those of parts that are frozen now are left out."""
        self.saved_rates = []
        for number, optimizer in self._with_state().items():
            own = state_dict[number]
            inner = own.get("optimizer", own)
            live = optimizer.optimizer.state_dict()["param_groups"]
            groups, rates = groups_to_load(live, inner["param_groups"])
            self.saved_rates += rates
            inner["param_groups"] = groups
            if not isinstance(optimizer, DistributedOptimizer):
                for group, now in zip(groups, live, strict=True):
                    group["params"] = now["params"]
                inner.setdefault("state", {})
                if hasattr(optimizer, "fp32_from_float16_groups"):
                    own[_LISTED] = _listed(own.pop(_MAIN, {}), optimizer.fp32_from_float16_groups)
            optimizer.load_state_dict(own)
        self._synchronize_steps()

    def use_saved_rates(self) -> None:
        """Take the learning rates of the checkpoint that was loaded."""
        groups = [g for each in self._with_state().values() for g in each.optimizer.param_groups]
        for group, rates in zip(groups, self.saved_rates, strict=True):
            if rates.saved is not None:
                group["max_lr"], group["min_lr"] = rates.saved


def _common(state: Any) -> Any:
    """A state without what each rank saves of its own."""
    if isinstance(state, dict):
        kept = {key: each for key, each in state.items() if not isinstance(each, ShardedBase)}
        return {key: _common(each) for key, each in kept.items()}
    if isinstance(state, list):
        return [_common(each) for each in state if not isinstance(each, ShardedBase)]
    return state


def _set_steps(groups: Sequence[dict[str, Any]], step: _Step | None) -> None:
    for group in groups:
        if step is not None and ("step" in group or not step.of_tensors):
            group["step"] = step.value if step.of_tensors else int(step.value)


def _by_places(state: dict[str, Any]) -> None:
    """Lists lose the places of what is empty on the rank that saves or loads; names do not."""
    if _LISTED in state:
        state[_MAIN] = {
            f"{number}.{place}": tensor
            for number, tensors in enumerate(state.pop(_LISTED))
            for place, tensor in enumerate(tensors)
        }


def _listed(by_place: dict[str, Any], like: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [
        [by_place[f"{number}.{place}"] for place in range(len(tensors))]
        for number, tensors in enumerate(like)
    ]


def optimizer_per_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``get_megatron_optimizer``: one chain of the optimizers of all parts.

    Each part's optimizers are built in its state, so that they shard over its groups. Every rank
    of a part has the same ones in the same order, also where it has no module, and every rank
    numbers all of them alike, since checkpoints do. The chain's gradient norm is the root of the
    sum of the squares of all parts; each is reduced over its own model parallel group (over all
    of its ranks with the distributed optimizer), where a parameter that several ranks hold counts
    once, and told to the ranks that the part has not, so it is the same on every rank.

    Collective over the world.
    """

    def get_megatron_optimizer(config: Any, model_chunks: Any, **kwargs: Any) -> Any:
        of_part: dict[str, list[Any]] = {}
        not_everywhere: dict[str, OnRanks] = {}
        for name, state in model_chunks[0].states.items():
            overrides = {
                **(kwargs.get("config_overrides") or get_standard_config_overrides(config)),
                **rate_overrides(config, model_chunks[0].lr_mults[name]),
            }
            rated = {**kwargs, "config_overrides": overrides}
            if state is None:
                # Megatron asks all ranks of the world for the settings of groups of parameters.
                chain = original(
                    config, [wrapper_of_nothing(each) for each in model_chunks], **rated
                )
            else:
                with state.entered():
                    chain = original(config, [each.parts[name] for each in model_chunks], **rated)
            assert type(chain) is ChainedOptimizer, type(chain)
            of_part[name] = [] if state is None else chain.chained_optimizers
            layout = layout_of(name) if name in PARALLEL_STATES else decoder_layout()
            if layout.world_size < dist.get_world_size():
                not_everywhere[name] = OnRanks(
                    first_rank=layout.first_rank,
                    optimizers=len(chain.chained_optimizers),
                    trains=not chain.is_stub_optimizer,
                )
        return OptimizerPerModule(of_part, not_everywhere=not_everywhere)

    return get_megatron_optimizer
