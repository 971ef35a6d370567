"""Cases of the rules in rules/pipeline.py."""

from rule_cases.kinds import PP, Cases

_EVALUATED = {"valid_data_path": [__file__], "eval_global_batch_size": 8}

CASES: Cases = {
    "pipeline-layers": (
        [
            {"world_size": 3, "pipeline_model_parallel_size": 3},
            {"world_size": 8, "pipeline_model_parallel_size": 8},
        ],
        [
            PP,
            {
                "world_size": 3,
                "pipeline_model_parallel_size": 3,
                "decoder_last_pipeline_num_layers": 2,
            },
        ],
    ),
    "virtual-needs-pipeline": (
        [{"num_virtual_stages_per_pipeline_rank": 2}, {"num_layers_per_virtual_pipeline_stage": 1}],
        [{"num_virtual_stages_per_pipeline_rank": 1}],
    ),
    "virtual-layers": (
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 3},
            {**PP, "num_layers_per_virtual_pipeline_stage": 3},
        ],
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 2},
            {**PP, "num_layers_per_virtual_pipeline_stage": 1},
        ],
    ),
    "virtual-microbatches": (
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 24},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 8},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": None},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "rampup_batch_size": [8, 8, 9]},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, **_EVALUATED},
        ],
        [
            {**PP, "global_batch_size": 24},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2},
            {**PP, **_EVALUATED},
            # 5 microbatches in groups of 3 and 2.
            {
                **PP,
                "num_virtual_stages_per_pipeline_rank": 2,
                "global_batch_size": 40,
                "microbatch_group_size_per_vp_stage": 3,
            },
        ],
    ),
    "virtual-overlap": (
        [{**PP, "num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_comm": False}],
        [{**PP, "overlap_p2p_comm": False}],
    ),
}
