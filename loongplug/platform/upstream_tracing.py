"""The functions of Megatron and torch that report their calls, in runs with ``--trace`` only."""

from collections.abc import Callable, Mapping
from typing import Any

from loongplug.platform.replacements import Replacement, ReplacementTable

_TRAINING = "megatron.training.training"
_PIPELINE = "megatron.core.pipeline_parallel"
_MODELS = "megatron.core.models.common"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_OPTIMIZER = "megatron.core.optimizer.optimizer"

# By target, the parameters that its wrapper was written for.
PARAMETERS: Mapping[str, str] = {
    f"{_TRAINING}.train_step": "(forward_step_func, data_iterator, model, optimizer, "
    "opt_param_scheduler, config, forward_backward_func, iteration, pg_collection, "
    "p2p_communicator)",
    f"{_TRAINING}.evaluate": "(forward_step_func, data_iterator, model, "
    "process_non_loss_data_func, config, verbose, non_loss_data_func, eval_iters, pg_collection, "
    "p2p_communicator)",
    f"{_TRAINING}.save_checkpoint_and_time": "(iteration, model, optimizer, opt_param_scheduler, "
    "num_floating_point_operations_so_far, checkpointing_context, non_persistent_ckpt, "
    "train_data_iterator)",
    f"{_PIPELINE}.schedules.forward_step": "(forward_step_func, data_iterator, model, "
    "num_microbatches, input_tensor, forward_data_store, config, cp_group_size, "
    "collect_non_loss_data, checkpoint_activations_microbatch, is_first_microbatch, "
    "current_microbatch, vp_stage, is_last_stage)",
    f"{_PIPELINE}.schedules.backward_step": "(input_tensor, output_tensor, output_tensor_grad, "
    "config)",
    f"{_PIPELINE}.combined_1f1b.combined_forward_backward_step": "(forward_step_func, "
    "data_iterator, f_model, num_microbatches, input_tensor, forward_data_store, b_model, "
    "b_input_tensor, b_output_tensor, b_output_tensor_grad, config, f_model_chunk_id, pre_forward, "
    "pre_backward, post_forward, post_backward, collect_non_loss_data, "
    "checkpoint_activations_microbatch, is_first_microbatch, current_microbatch, "
    "encoder_decoder_xattn, fsdp_wrapper)",
    f"{_MODELS}.model_chunk_schedule_plan.TransformerLayerSchedulePlan._build_callable_nodes": "("
    "self, event, comp_stream, comm_stream, extra_args)",
    f"{_MODELS}.utils.TransformerLayerNode.backward_dw": "(self)",
    f"{_PIPELINE}.utils.ScheduleNode.stream_acquire_context": "(self, name)",
    f"{_PIPELINE}.p2p_communication.P2PCommunicator._communicate": "(self, *, tensor_send_next, "
    "tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs)",
    f"{_PIPELINE}.p2p_communication.P2PCommunicator._communicate_shapes": "(self, "
    "tensor_send_next, tensor_send_prev, recv_prev, recv_next)",
    "megatron.core.distributed.finalize_model_grads.finalize_model_grads": "(model, num_tokens, "
    "pg_collection, force_all_reduce)",
    f"{_BUCKETS}.finish_grad_sync": "(self, force_all_reduce)",
    f"{_BUCKETS}.finish_param_sync": "(self, skip_next_bucket_dispatch)",
    f"{_OPTIMIZER}.MixedPrecisionOptimizer.step": "(self)",
    f"{_OPTIMIZER}.FP32Optimizer.step": "(self)",
    f"{_OPTIMIZER}.ChainedOptimizer.step": "(self)",
}


def tracing_table(wrappers: Mapping[str, Callable[[Any], Any]]) -> ReplacementTable:
    """Every target of ``PARAMETERS``, and functions of ``torch.distributed``, by their wrappers.

    isend and irecv stay: ``P2POp`` takes none but torch's own.
    """
    assert wrappers.keys() >= PARAMETERS.keys()
    rows = tuple(
        Replacement(
            target=target,
            wrapper=wrapper,
            parameters=PARAMETERS.get(target),  # torch's are not the same in each version
            reason="reports its calls; there is no hook for it",
        )
        for target, wrapper in wrappers.items()
    )
    return ReplacementTable("tracing", rows, importers=("megatron", "loongplug"))
