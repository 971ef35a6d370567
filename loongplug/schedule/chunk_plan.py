"""A chunk's schedule plan: the node that asks for features, and the plans of its layers."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.common.utils import PreProcessNode
from torch import Tensor

from loongplug.data.microbatch import Unit
from loongplug.models.layers.inputs import PackedSegments
from loongplug.models.multimodal import MultimodalModel
from loongplug.schedule.layer_plan import LayerPlan
from loongplug.schedule.tensor_offload import TensorOffload


def plan_schedules(chunk: MultimodalModel, *, offload: TensorOffload | None = None) -> None:
    """Have a chunk answer Megatron's combined schedule, which wants plans in forward's place.

    With ``offload``, its layers let go of the tensors that are named to it.
    """
    chunk.build_schedule_plan = partial(ChunkPlan, chunk, offload=offload)


class InputNode(PreProcessNode):
    """The first layer's input: what the chunk's forward makes, of the same features.

    Backward goes on from there to the embedding, and to the encoder or whatever the feature
    source does with a gradient.
    """

    def forward_impl(self) -> Tensor:
        """[(1 + deepstack features) * s, b, hidden], or what the stage before has sent."""
        state = self.chunk_state
        segments = state.packed_seq_params
        placed = state.composed.placed(
            state.input_ids,
            state.units,
            number=state.number,
            row=None if segments is None else segments.context,
        )
        state.units = None  # media may be let go before the microbatch's backward
        decoder_input = self.model.first_input(state.input_ids, placed)
        if decoder_input is not None and not decoder_input.requires_grad:
            # Nodes go backward by their inputs: they ask for a gradient even where nothing in
            # front of the layers trains.
            decoder_input.requires_grad_()
        state.decoder_input = decoder_input
        hidden_states: Tensor = super().forward_impl()
        return hidden_states


class ChunkPlan(TransformerModelChunkSchedulePlan):
    """One microbatch's way through one chunk.

    Of the microbatch it has what the chunk's forward is given, and of the encoder's work nothing
    but the microbatch's identity.
    """

    LAYER_SCHEDULE_PLAN_CLASS = LayerPlan
    PRE_PROCESS_NODE_CLASS = InputNode

    def __init__(
        self,
        model: MultimodalModel,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        units: Mapping[str, Unit] = MappingProxyType({}),
        number: int | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        offload: TensorOffload | None = None,
    ) -> None:
        """As :meth:`MultimodalModel.forward`; nothing is computed yet."""
        decoder = model.text_decoder
        if decoder.config.fine_grained_activation_offloading:  # Megatron's own, of modules
            decoder.preprocess_for_fine_grained_offloading()
        self._next_layer = None if offload is None else offload.begin_pass(in_nodes=True)
        super().__init__(
            decoder,
            input_ids,
            position_ids,
            attention_mask=None,
            labels=labels,
            packed_seq_params=packed_seq_params,
            loss_mask=loss_mask,
            padding_mask=decoder.router_mask(
                position_ids, loss_mask, packed_seq_params=packed_seq_params
            ),
        )
        self.state.composed = model
        self.state.units = units
        self.state.number = number
        self._before_backward: list[Callable[[], None]] = []

    def on_backward(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, too, when the microbatch's backward through this chunk begins."""
        self._before_backward.append(call)

    @staticmethod
    def run(f_schedule_plan: Any, b_schedule_plan: Any, **options: Any) -> Any:
        """As upstream's, which runs one plan's forward with another's backward; None for none."""
        for call in () if b_schedule_plan is None else b_schedule_plan._before_backward:
            call()
        return TransformerModelChunkSchedulePlan.run(f_schedule_plan, b_schedule_plan, **options)

    def _extra_args_for_layer(self, *args: Any) -> dict[str, Any]:
        extra: dict[str, Any] = super()._extra_args_for_layer(*args)
        return extra | {"tensors": None if self._next_layer is None else self._next_layer()}

    def release_state(self) -> Any:
        """Let go of the model too."""
        super().release_state()
        self.state.composed = None
