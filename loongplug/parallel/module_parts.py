"""Under which parallel state a module of the composed model trains."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from loongplug.parallel.hooks import run_in_state
from loongplug.parallel.states import parallel_state_of


@dataclass(frozen=True, kw_only=True)
class ModuleState:
    """Where a part of the composed model is sharded and how its gradients add up.

    ``state`` names the parallel state that the part is built in and runs in; None where it shares
    the one that Megatron has set up. ``groups`` are that state's.

    ``gradient_factor`` times the sum of the gradients over all replicas is the gradient of the
    global batch, before the loss's own normalization: 1 where each unit is encoded once, 1 / n
    where n replicas encode the same unit.
    """

    groups: ProcessGroupCollection
    state: str | None = None
    gradient_factor: float = 1.0

    def entered(self) -> AbstractContextManager[None]:
        """Inside, Megatron's globals are those of this state."""
        return nullcontext() if self.state is None else parallel_state_of(self.state)

    def run(self, module: nn.Module) -> None:
        """From now on forward, recompute and backward of ``module`` run in this state."""
        if self.state is not None:
            run_in_state(module, self.state)


@dataclass(frozen=True, kw_only=True)
class ModulePart:
    """The modules of one model chunk that train in one state, by their names in the chunk.

    Every chunk of every rank has parts of the same names in the same order. ``state`` is None
    where this rank has no part in it; a part that has a state and no modules takes part in what
    all ranks of the state do together. ``lr_mults`` are multiples of the learning rate by the
    names of modules; one that is not among them has the rate itself.
    """

    name: str
    state: ModuleState | None
    modules: dict[str, nn.Module]
    lr_mults: dict[str, float] = field(default_factory=dict)
