"""Megatron's schedule in a step that streams: with all encoders' work between its passes."""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from loongplug.hetero.bubbles import BubbleCommunicator
from loongplug.hetero.executor import Executor, Schedule
from loongplug.hetero.pipeline_wires import PipelineGroups
from loongplug.observe.recorder import NOTHING, Recorder

# What Megatron's schedules, and what finalises gradients behind them, look for.
_GROUPS = ["tp", "cp", "pp", "dp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"]


class BubbleSchedule:
    """What is put around a schedule within the executors of all encoders that may stream."""

    def __init__(
        self,
        executors: Sequence[Executor],
        groups: PipelineGroups,
        *,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``executors`` are in the entries' order; ``groups`` is what stages send over then."""
        self._executors = executors
        self._groups = groups
        self._recorder = recorder
        self._turns = 0  # of the step

    def within(self, schedule: Schedule) -> Schedule:
        """``schedule`` as it is; in a step that streams, by a communicator that has work done."""

        def forward_backward(*, model: Any, **options: Any) -> Any:
            streaming = [each.pieces for each in self._executors if each.pieces is not None]
            if not streaming:
                return schedule(model=model, **options)
            self._turns = max(each.turns for each in self._executors)
            communicator = BubbleCommunicator(
                parallel_state.get_pipeline_model_parallel_group(),
                get_model_config(model[0] if isinstance(model, list) else model),
                groups=self._groups,
                forwards=streaming[0].forwards,
                work=self,
                recorder=self._recorder,
            )
            groups = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
            options |= {"p2p_communicator": communicator, "pg_collection": groups}
            result = schedule(model=model, **options)
            communicator.finish()
            return result

        return forward_backward

    def before_pass(self, number: int) -> None:
        """Before a pass of the stage; see :class:`~.bubbles.BubbleWork`."""
        for turn in range(self._turns):
            for each in self._executors:
                each.before_pass(number, turn)
