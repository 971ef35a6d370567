"""The functions of Megatron and torch that report their calls, in runs with ``--trace`` only."""

from collections.abc import Callable, Mapping
from typing import Any

from loongplug.platform.replacements import Replacement, ReplacementTable

_NO_HOOK = "reports its calls; there is no hook for it"

# By target, the signature that its wrapper was written for.
SIGNATURES: Mapping[str, str] = {
    "megatron.training.training.train_step": "(forward_step_func, data_iterator, model, optimizer, "
    "opt_param_scheduler, config, forward_backward_func, iteration=None, pg_collection: "
    "Union[megatron.core.process_groups_config.ProcessGroupCollection, "
    "megatron.core.process_groups_config.MultiModuleProcessGroupCollection, NoneType] = None, "
    "p2p_communicator: Optional[megatron.core.pipeline_parallel.p2p_communication."
    "P2PCommunicator] = None)",
    "megatron.training.training.evaluate": "(forward_step_func, data_iterator, model, "
    "process_non_loss_data_func, config, verbose=False, non_loss_data_func=None, eval_iters=None, "
    "pg_collection=None, p2p_communicator=None)",
    "megatron.training.training.save_checkpoint_and_time": "(iteration, model, optimizer, "
    "opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context, "
    "non_persistent_ckpt=False, train_data_iterator=None)",
    "megatron.core.pipeline_parallel.schedules.forward_step": "(forward_step_func, data_iterator, "
    "model, num_microbatches, input_tensor, forward_data_store, config, cp_group_size, "
    "collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
    "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)",
    "megatron.core.pipeline_parallel.schedules.backward_step": "(input_tensor, output_tensor, "
    "output_tensor_grad, config)",
    "megatron.core.pipeline_parallel.combined_1f1b.combined_forward_backward_step": "("
    "forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, "
    "forward_data_store, b_model, b_input_tensor, b_output_tensor, b_output_tensor_grad, config, "
    "f_model_chunk_id=None, pre_forward=None, pre_backward=None, post_forward=None, "
    "post_backward=None, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
    "is_first_microbatch=False, current_microbatch=None, encoder_decoder_xattn=False, "
    "fsdp_wrapper=None)",
    "megatron.core.models.common.model_chunk_schedule_plan.TransformerLayerSchedulePlan."
    "_build_callable_nodes": "(self, event, comp_stream, comm_stream, extra_args)",
    "megatron.core.models.common.utils.TransformerLayerNode.backward_dw": "(self)",
    "megatron.core.pipeline_parallel.utils.ScheduleNode.stream_acquire_context": "(self, "
    "name=None)",
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate": "(self, *, "
    "tensor_send_next: Optional[torch.Tensor], tensor_send_prev: Optional[torch.Tensor], "
    "recv_prev: bool, recv_next: bool, tensor_shape: Union[List[int], torch.Size], "
    "wait_on_reqs: bool = True) -> Tuple[torch.Tensor, torch.Tensor]",
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes": "("
    "self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)",
    "megatron.core.distributed.finalize_model_grads.finalize_model_grads": "(model: "
    "List[torch.nn.modules.module.Module], num_tokens: Optional[torch.Tensor] = None, "
    "pg_collection: Optional[megatron.core.process_groups_config.ProcessGroupCollection] = None, "
    "force_all_reduce: Optional[bool] = False)",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.finish_grad_sync": "("
    "self, force_all_reduce: Optional[bool] = False)",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup."
    "finish_param_sync": "(self, skip_next_bucket_dispatch: bool = False)",
    "megatron.core.optimizer.optimizer.MixedPrecisionOptimizer.step": "(self)",
    "megatron.core.optimizer.optimizer.FP32Optimizer.step": "(self)",
    "megatron.core.optimizer.optimizer.ChainedOptimizer.step": "(self)",
}


def tracing_table(wrappers: Mapping[str, Callable[[Any], Any]]) -> ReplacementTable:
    """Every target of ``SIGNATURES``, and functions of ``torch.distributed``, by their wrappers.

    isend and irecv stay: ``P2POp`` takes none but torch's own.
    """
    assert wrappers.keys() >= SIGNATURES.keys()
    rows = tuple(
        Replacement(
            target=target,
            wrapper=wrapper,
            signature=SIGNATURES.get(target),  # torch's say the same in each version differently
            reason=_NO_HOOK,
        )
        for target, wrapper in wrappers.items()
    )
    return ReplacementTable("tracing", rows, importers=("megatron", "loongplug"))
