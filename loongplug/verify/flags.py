"""The command lines of the two runs, made from the user's."""

from collections.abc import Sequence

from loongplug.training.flags import without_flags

# By their names in args. What a run writes, when it stops, and how fast it goes: not compared.
_OUTPUT = """
save save_hf save_lora save_interval save_retain_interval metrics_json metrics_name tensorboard_dir
wandb_project wandb_exp_name wandb_save_dir wandb_entity log_interval log_params_norm log_throughput
log_progress log_num_zeros_in_grad log_energy log_straggler timing_log_level async_save
async_strategy use_persistent_ckpt_worker non_persistent_save_interval non_persistent_ckpt_type
non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo
save_params_interval save_activations_interval save_tokens_per_expert_interval
save_wgrads_interval save_dgrads_interval exit_interval exit_duration_in_mins profile
use_pytorch_profiler record_memory_history valid_data_path valid_share eval_iters eval_interval
eval_global_batch_size eval_micro_batch_size num_workers rerun_mode print_config trace
"""
# Verified in fp32, without dropout, at a constant learning rate and batch size from
# the first step on.
_REPLACED = """
bf16 grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32 use_precision_aware_optimizer
main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype hidden_dropout
attention_dropout moe_input_jitter_eps epochs train_iters train_samples lr_decay_style
lr_decay_iters lr_warmup_iters lr_warmup_fraction lr_warmup_samples lr_warmup_init min_lr
lr_decay_samples lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples
override_opt_param_scheduler use_checkpoint_opt_param_scheduler rampup_batch_size
step_batch_size_schedule
"""
# What the single rank does without.
_LAYOUT = """
tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
expert_model_parallel_size expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage
num_virtual_stages_per_pipeline_rank microbatch_group_size_per_vp_stage
decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split sequence_parallel use_distributed_optimizer
num_distributed_optimizer_instances overlap_grad_reduce overlap_param_gather
overlap_param_gather_with_optimizer_step align_param_gather align_grad_reduce ddp_bucket_size
ddp_num_buckets ddp_average_in_collective ddp_pad_buckets_for_high_nccl_busbw
overlap_p2p_comm overlap_p2p_comm_warmup_flush recompute_granularity recompute_method
recompute_num_layers recompute_modules recompute_activations distribute_saved_activations
moe_layer_recompute moe_token_dispatcher_type moe_grouped_gemm tp_comm_overlap
pipeline_model_parallel_comm_backend use_tp_pp_dp_mapping cp_comm_type cp_balance
hierarchical_context_parallel_sizes overlap_moe_expert_parallel_comm delay_wgrad_compute
fine_grained_activation_offloading offload_modules offload_tensors enable_encoder_hetero_dp
enable_full_hetero_dp full_hetero_dp_schedule full_hetero_dp_encoder_speed use_vit_dp_balance
dp_balance_trigger_threshold_vit full_hetero_dp_cpu_offload offload_encoder_activations
offload_encoder_state
decrease_batch_size_if_needed
"""
_SOURCES = "load load_hf load_lora ckpt_step finetune pretrained_checkpoint"

OUTPUT, REPLACED, LAYOUT, SOURCES = (
    frozenset(names.split()) for names in (_OUTPUT, _REPLACED, _LAYOUT, _SOURCES)
)


def common_flags(argv: Sequence[str], *, steps: int, drop_sources: bool) -> list[str]:
    """The user's flags as both runs take them; ``drop_sources``: without the user's weights."""
    dropped = OUTPUT | REPLACED | (SOURCES if drop_sources else frozenset())
    return [
        *without_flags(argv, dropped),
        *("--train-iters", str(steps), "--lr-decay-style", "constant"),
        *("--log-interval", "1", "--num-workers", "0", "--rerun-mode", "disabled"),
        *("--hidden-dropout", "0", "--attention-dropout", "0"),
    ]


def reference_flags(
    argv: Sequence[str], *, global_batch_size: int, encoders: Sequence[str]
) -> list[str]:
    """The single rank's flags, of the layout's: the same model and batch, nothing parallel."""
    return [
        *without_flags(argv, LAYOUT | {"global_batch_size"}),
        *("--global-batch-size", str(global_batch_size)),
        *(
            f"model.{encoder}.{plain}"
            for encoder in encoders
            for plain in (
                *("tensor_model_parallel_size=1", "data_parallel_size=1", "rank_offset=null"),
                *("pipeline_model_parallel_size=1", "stage_layers=null"),
                *("mode=null", "recompute=false"),
            )
        ),
    ]
