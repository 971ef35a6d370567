"""What of megatron-core keeps values per process, as looked through for parallel states.

Compared with the installed version by test_state_coverage.py. A name that is new there has to be
looked at: does it belong to a module's layout? Then it goes into snapshot.OTHER_GLOBALS;
else it is added here.
"""

# Folders of which nothing runs in training here.
UNUSED = ("inference/", "resharding/", "export/", "distributed/fsdp/")

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
    "dist_checkpointing/strategies/filesystem_async.py": {"_results_queue"},
    "dist_checkpointing/strategies/torch.py": {"_logged_mcore_async_deprecation"},
    "distributed/param_and_grad_buffer.py": {"dist_reduce_scatter_func"},
    "fault_injector.py": {"rng"},
    "full_cuda_graph.py": {"_shared_capture_stream", "_shared_graph_pool"},
    "jit.py": {"jit_fuser"},
    "models/backends.py": {"LNImpl"},
    "models/common/embeddings/rope_utils.py": {
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    },
    "nccl_allocator.py": {"_allocator"},
    "ssm/ops/determinism.py": {"_autotune_warning_issued", "_deterministic_override"},
    "transformer/cuda_graphs.py": {
        "HAVE_TE_GRAPHS",
        "_IS_GRAPH_CAPTURING",
        "_IS_GRAPH_WARMUP",
        "bwd_buffer_reuse_ref_count",
        "fwd_buffer_reuse_ref_count",
    },
    "transformer/custom_layers/batch_invariant_kernels.py": {
        "_MEG_TE_GENERAL_GEMM_ORIG",
        "_TE_GENERAL_GEMM_ORIG",
        "_TE_RMSNORM_ORIG_FWD",
        "_batch_invariant_LIB",
        "_batch_invariant_MODE",
    },
    "transformer/experimental_attention_variant/dsa_cudnn_kernels.py": {
        "_cudnn_dsa",
        "_flash_mla_sparse_fwd",
    },
    "transformer/experimental_attention_variant/dsa_kernels.py": {"_BACKEND", "_BACKEND_SELECTION"},
    "transformer/experimental_attention_variant/ops/tilelang_dsa.py": {
        "_DSA_SCRATCH_CACHE_TOTAL_BYTES"
    },
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
    # Not used.
    "tensor_parallel/generalized_tensor_parallelism.py": {
        "_CG_MEMPOOL",
        "_CG_MEMPOOL_DEVICE",
        "_CUDA_GRAPH_MODULES",
        "_FULL_ITERATION",
        "_GTP_CACHE",
        "_GTP_PARAMS",
        "_MOE_SHARED_EXPERT_OVERLAP",
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
    "transformer/experimental_attention_variant/dsa.py": {
        "DSAIndexerLossAutoScaler.main_loss_backward_scale"
    },
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
    "full_cuda_graph.py": {
        "FullCudaGraphWrapper.cuda_graph",
        "FullCudaGraphWrapper.curr_iteration",
        "FullCudaGraphWrapper.result",
    },
    "optimizer/optimizer_cuda_graph.py": {
        "OptimizerCudaGraphWrapper.cuda_graph",
        "OptimizerCudaGraphWrapper.curr_iteration",
        "OptimizerCudaGraphWrapper.result",
    },
    "transformer/cuda_graphs.py": {
        "CudaGraphManager.global_mempool",
        "_CudagraphGlobalRecord.cudagraph_created",
        "_CudagraphGlobalRecord.cudagraph_inference_record",
        "_CudagraphGlobalRecord.cudagraph_record",
        "cls._saved_tensors_observer",
        "cls.cudagraph_created",
        "cls.cudagraph_record",
    },
    # By rank lists of their own, by file, or said once.
    "pipeline_parallel/bridge_communicator.py": {
        "cls._bridge_pg_cache",
        "cls._broadcast_pg_cache",
    },
    "dist_checkpointing/strategies/async_utils.py": {
        "AsyncCallsQueue._persistent_caller",
        "PersistentAsyncCaller._persistent_comp_q",
        "PersistentAsyncCaller._persistent_preload_q",
        "PersistentAsyncCaller._persistent_process",
        "PersistentAsyncCaller._persistent_queue",
        "cls._persistent_comp_q",
        "cls._persistent_preload_q",
        "cls._persistent_process",
        "cls._persistent_queue",
    },
    "dist_checkpointing/strategies/cached_metadata_filesystem_reader.py": {
        "CachedMetadataFileSystemReader._metadata_cache"
    },
    "models/common/language_module/language_module.py": {
        "LanguageModule.embedding_warning_printed"
    },
    "models/hybrid/hybrid_model.py": {"HybridModel.mup_warning_printed"},
    "utils.py": {"StragglerDetector._configured", "cls._instance"},
    # Not used.
    "tensor_parallel/generalized_tensor_parallelism.py": {
        "cls._chain_state",
        "cls._recompute_chain_state",
    },
    "transformer/moe/token_dispatcher_inference.py": {
        "InferenceAllGatherDispatcherBase._host_valid_tokens_estimate",
        "InferenceAllGatherDispatcherBase._valid_tokens_tensor",
        "cls._local_tokens_per_rank",
        "cls._per_rank_worst_case_token_count",
        "cls._real_token_count_tensor",
        "cls._step_metadata",
        "cls._symm_agv_hidden",
        "cls._symm_agv_probs",
        "cls._symm_agv_routing",
        "cls._symm_metadata",
        "cls._symm_rsv",
        "cls._valid_tokens_tensor",
    },
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
    "ssm/gated_delta_net/common.py": {"_build_head_perm_for_split_sections"},
    "transformer/experimental_attention_variant/dsa_cudnn_kernels.py": {"_device_sm"},
    "transformer/pipeline_parallel_layer_layout.py": {"from_str"},
    "utils.py": {"_nvtx_decorator_get_func_path"},
}
