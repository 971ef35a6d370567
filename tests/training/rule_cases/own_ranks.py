"""Cases of the rules in rules/own_ranks.py.

An encoder apart lies on 2 ranks behind the 8 of the decoder, unless a case says otherwise.
"""

from rule_cases.kinds import Cases, placed

APART = ("image_encoder.rank_offset=8", "image_encoder.data_parallel_size=2")
STAGES = ("image_encoder.rank_offset=8", "image_encoder.pipeline_model_parallel_size=2")
_SPREADING = (
    *("enable_encoder_hetero_dp", "enable_full_hetero_dp", "use_vit_dp_balance"),
    *("full_hetero_dp_cpu_offload", "offload_encoder_activations", "offload_encoder_state"),
)

CASES: Cases = {
    "positive-sizes": (
        [
            placed("image_encoder.rank_offset=0", APART[1]),
            placed(APART[0], "image_encoder.data_parallel_size=0", ranks=8),
        ],
        [placed(APART[0], ranks=9)],
    ),
    "own-ranks-modes": (
        [
            *(placed(*APART, **{name: True}) for name in _SPREADING),
            placed(*APART, "image_encoder.mode='uniform'"),
        ],
        [],
    ),
    "encoder-state": (
        [
            placed(*APART, log_params_norm=True),
            placed(*APART, num_distributed_optimizer_instances=2),
        ],
        [],
    ),
    "own-ranks-sizes": (
        [
            placed("image_encoder.data_parallel_size=2", ranks=8),
            placed("image_encoder.pipeline_model_parallel_size=2", ranks=8),
            placed("image_encoder.stage_layers=[2]", ranks=8),
            placed("image_encoder.stage_layers=[]", ranks=8),
        ],
        [placed(*STAGES), placed(*STAGES, "image_encoder.stage_layers=[1,2]")],
    ),
    "own-ranks-layers": (
        [
            placed(APART[0], "image_encoder.pipeline_model_parallel_size=4", ranks=12),
            placed(*STAGES, "image_encoder.stage_layers=[1,1]"),
            placed(*STAGES, "image_encoder.stage_layers=[3,0]"),
            placed(*STAGES, "image_encoder.stage_layers=[3]"),
        ],
        [placed(APART[0], "image_encoder.pipeline_model_parallel_size=3", ranks=11)],
    ),
    "encoder-sizes": (
        [
            placed(
                *(APART[0], "image_encoder.num_attention_heads=4"),
                "image_encoder.tensor_model_parallel_size=3",
                ranks=11,
            )
        ],
        [placed(APART[0], "image_encoder.tensor_model_parallel_size=2")],
    ),
}

OMNI: Cases = {
    "own-ranks-world": (
        [
            placed(APART[0], "audio_encoder.rank_offset=8"),
            placed(APART[0], "audio_encoder.rank_offset=10"),
        ],
        [placed(*APART, "audio_encoder.rank_offset=10", ranks=11)],
    ),
    "own-ranks-modes": (
        [placed(APART[0], "image_encoder.mode='full_hetero_dp'", ranks=9)],
        [placed("audio_encoder.rank_offset=8", "image_encoder.mode='full_hetero_dp'", ranks=9)],
    ),
}
