"""What of megatron-core keeps values per process, as looked through for parallel states.

Compared with the installed version by test_state_coverage.py. A name that is new there has to be
looked at: does it belong to a module's layout? Then it goes into megatron_globals.OTHER_GLOBALS;
else it is added here.
"""

# Folders and files of which nothing runs in training here, or nothing that knows a layout.
UNUSED = (
    *("inference/", "resharding/", "export/", "distributed/fsdp/", "dist_checkpointing/"),
    *("models/hybrid/", "ssm/", "transformer/experimental_attention_variant/"),
    *("transformer/custom_layers/", "transformer/moe/token_dispatcher_inference.py"),
    *("tensor_parallel/generalized_tensor_parallelism.py", "fault_injector.py"),
    *("transformer/cuda_graphs.py", "full_cuda_graph.py", "optimizer/optimizer_cuda_graph.py"),
)

# Names under a ``global`` statement, by file; parallel_state.py is discovered as a whole.
GLOBALS: dict[str, set[str]] = {
    # Covered by a snapshot, but for the names of the trackers, which nobody changes,
    # IS_CHECKPOINTING, which is so for whatever computes, and a compiled extension.
    "tensor_parallel/random.py": {
        "IS_CHECKPOINTING",
        "_CUDA_RNG_STATE_TRACKER",
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED",
        "_DATA_PARALLEL_RNG_TRACKER_NAME",
        "_EXPERT_PARALLEL_RNG_TRACKER_NAME",
        "_share_storage_ext",
    },
    "transformer/moe/moe_logging.py": {"_MOE_METRICS_TRACKER"},
    # Of the decoder alone: its schedule, microbatches, experts' exchange, pipeline streams.
    "num_microbatches_calculator.py": {"_GLOBAL_NUM_MICROBATCHES_CALCULATOR"},
    "pipeline_parallel/utils.py": {"_COMM_STREAM"},
    "rerun_state_machine.py": {"_GLOBAL_RERUN_STATE_MACHINE"},
    "transformer/moe/fused_a2a.py": {"_buffer", "_hybrid_ep_buffer"},
    "transformer/moe/router_trace.py": {"_MOE_ROUTER_TRACER"},
    # By model or by tensor: equal in every state.
    "transformer/utils.py": {"_sequence_parallel_attr_cache", "cuda_graph_attr_cache"},
    # What this machine can do, settings of the whole process, caches of kernels and memory.
    "config.py": {"ENABLE_EXPERIMENTAL"},
    "config_logger.py": {"__config_logger_path_counts"},
    "distributed/param_and_grad_buffer.py": {"dist_reduce_scatter_func"},
    "jit.py": {"jit_fuser"},
    "models/backends.py": {"LNImpl"},
    "models/common/embeddings/rope_utils.py": {
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    },
    "nccl_allocator.py": {"_allocator"},
    "utils.py": {
        "_ASYNC_IO_LOOP",
        "_causal_conv1d_version",
        "_fa_version",
        "_flashinfer_version",
        "_mamba_ssm_version",
        "_nvtx_enabled",
        "_te_version",
        "_torch_version",
    },
}

# Attributes that functions set on a class of their own file, by file.
CLASS_ATTRIBUTES: dict[str, set[str]] = {
    # Scales of the balancing and other auxiliary losses. The schedule sets them once a
    # microbatch, from the loss scale, for all of the model; a copy per state would stay behind.
    "transformer/moe/moe_utils.py": {
        "MoEAuxLossAutoScaler.main_loss_backward_scale",
        "RandomSTEShared._cache",  # a test aid: forced load balancing
    },
    "transformer/multi_token_prediction.py": {"MTPLossAutoScaler.main_loss_backward_scale"},
    # Streams, pools and managers of the device: one of each for the process.
    "extensions/transformer_engine.py": {"TEDotProductAttention.cp_stream"},
    "transformer/moe/shared_experts.py": {"SharedExpertMLP.stream"},
    "transformer/moe/token_dispatcher.py": {
        "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        "_NCCLEPManager._zc_bwd_token_buf",
        "_NCCLEPManager._zc_fwd_token_buf",
        "_NCCLEPManager._zc_recv_topk_weights_buf",
    },
    "transformer/moe/paged_stash.py": {"cls.STASH_MGR"},
    "pipeline_parallel/fine_grained_activation_offload.py": {
        "cls.OFFLOAD_MGR",
    },
    # By rank lists of their own, by file, or said once.
    "pipeline_parallel/bridge_communicator.py": {
        "cls._bridge_pg_cache",
        "cls._broadcast_pg_cache",
    },
    "models/common/language_module/language_module.py": {
        "LanguageModule.embedding_warning_printed"
    },
    "utils.py": {"StragglerDetector._configured", "cls._instance"},
}

# Functions whose answers are kept, by file. None of them reads parallel_state: groups and sizes
# are among their arguments, or those of the object that they are methods of.
CACHED: dict[str, set[str]] = {
    "datasets/indexed_dataset.py": {"__getitem__"},
    "models/common/embeddings/rotary_pos_embedding.py": {"forward"},
    "models/common/embeddings/yarn_rotary_pos_embedding.py": {
        "_yarn_get_concentration_factor",
        "forward",
    },
    "nccl_allocator.py": {"get_func_args"},
    "pipeline_parallel/hybrid_cp_schedule.py": {"get_total_workload", "gpus_needed"},
    "transformer/pipeline_parallel_layer_layout.py": {"from_str"},
    "utils.py": {"_nvtx_decorator_get_func_path"},
}
