"""Cases of the rules in rules/hetero.py."""

from rule_cases.kinds import LAYOUT, Case, Cases, model, placed

APART = ("image_encoder.rank_offset=8", "image_encoder.data_parallel_size=2")
STAGES = ("image_encoder.rank_offset=8", "image_encoder.pipeline_model_parallel_size=2")
_SPREADING = (
    *("enable_encoder_hetero_dp", "enable_full_hetero_dp", "use_vit_dp_balance"),
    *("full_hetero_dp_cpu_offload", "offload_encoder_activations", "offload_encoder_state"),
)
BALANCE = {"use_vit_dp_balance": True, "enable_full_hetero_dp": True}
FULL = {"enable_full_hetero_dp": True}
_SEPARATED = {"full_hetero_dp_schedule": "separated"}
_OWN_TP = "image_encoder.tensor_model_parallel_size=1"
OFFLOAD = ("full_hetero_dp_cpu_offload", "offload_encoder_activations", "offload_encoder_state")


def _stages(encoder_tp: int, *, tp: int, pp: int, **mode: bool) -> Case:
    """An encoder whose sizes are divided by any tensor parallel size, in a run of 8 ranks."""
    heads = "image_encoder.num_attention_heads=12"
    sizes = (heads, "image_encoder.hidden_size=96", "image_encoder.ffn_hidden_size=192")
    own = f"image_encoder.tensor_model_parallel_size={encoder_tp}"
    return model(*sizes, own, tp=tp, **LAYOUT, pipeline_model_parallel_size=pp, **mode)


CASES: Cases = {
    "offload-fusion": (
        [{**FULL, "offload_encoder_activations": True, "gradient_accumulation_fusion": True}],
        [
            {**FULL, "offload_encoder_state": True, "gradient_accumulation_fusion": True},
            {"gradient_accumulation_fusion": True},
        ],
    ),
    "full-separation-flags": (
        [
            *({name: True} for name in ("use_vit_dp_balance", *OFFLOAD)),
            {"enable_encoder_hetero_dp": True, "offload_encoder_state": True},
            {"full_hetero_dp_schedule": "streamed"},
            placed(*APART, full_hetero_dp_schedule="streamed"),
            {"full_hetero_dp_encoder_speed": 2.0},
            {**FULL, "full_hetero_dp_encoder_speed": 0.0},
            {**FULL, **_SEPARATED, "full_hetero_dp_encoder_speed": 2.0},
            {**FULL, "dp_balance_trigger_threshold_vit": 0.1},
        ],
        [
            *({**FULL, name: True} for name in ("use_vit_dp_balance", *OFFLOAD)),
            _SEPARATED,
            {**FULL, "full_hetero_dp_encoder_speed": 2.0},
            {**BALANCE, "dp_balance_trigger_threshold_vit": 0.0},
        ],
    ),
    "offload-nccl": (
        [{**FULL, "offload_encoder_state": True, "nccl_ub": True}],
        [{**FULL, "full_hetero_dp_cpu_offload": True, "nccl_ub": True}],
    ),
    "offload-optimizer": (
        [{**FULL, "offload_encoder_state": True, "optimizer_cpu_offload": True}],
        [
            {**FULL, "full_hetero_dp_cpu_offload": True, "optimizer_cpu_offload": True},
            {"optimizer_cpu_offload": True},
        ],
    ),
    "one-mode": (
        [{"enable_encoder_hetero_dp": True, "enable_full_hetero_dp": True}],
        [{"enable_encoder_hetero_dp": True}, {"enable_full_hetero_dp": True}],
    ),
    "encoder-state": (
        [
            model(_OWN_TP, tp=2, log_params_norm=True),
            model(_OWN_TP, tp=2, log_num_zeros_in_grad=True),
            model(_OWN_TP, tp=2, num_distributed_optimizer_instances=2),
            placed(*APART, log_params_norm=True),
        ],
        [model(_OWN_TP, tp=2), model(tp=2, log_params_norm=True)],
    ),
    "encoder-layout": (
        [
            model("image_encoder.tensor_model_parallel_size=2"),
            _stages(2, tp=1, pp=2, enable_encoder_hetero_dp=True),
            _stages(2, tp=1, pp=1, enable_full_hetero_dp=True),
            _stages(3, tp=1, pp=4, enable_full_hetero_dp=True),
        ],
        [
            model("image_encoder.tensor_model_parallel_size=2", tp=2),
            model(_OWN_TP, tp=2),
            _stages(4, tp=2, pp=2, enable_full_hetero_dp=True),
            _stages(2, tp=1, pp=4, enable_full_hetero_dp=True),
        ],
    ),
    "encoder-sizes": (
        [
            model("image_encoder.num_attention_heads=1", tp=2),
            model("image_encoder.ffn_hidden_size=127", tp=2),
            placed(
                *(APART[0], "image_encoder.num_attention_heads=4"),
                "image_encoder.tensor_model_parallel_size=3",
                ranks=11,
            ),
            model(
                "image_encoder.hidden_size=20",
                "image_encoder.num_attention_heads=1",
                "image_encoder.spatial_merge_size=1",
                tp=2,
            ),
        ],
        [
            model("image_encoder.num_attention_heads=2", tp=2),
            placed(APART[0], "image_encoder.tensor_model_parallel_size=2"),
            model(
                "image_encoder.num_attention_heads=1",
                "image_encoder.tensor_model_parallel_size=1",
                tp=2,
            ),
        ],
    ),
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
}

QWEN2_5: Cases = {
    "encoder-sizes": (
        [model("image_encoder.ffn_hidden_size=3422", "foundation.num_query_groups=4", tp=4)],
        [model("image_encoder.ffn_hidden_size=3420", "foundation.num_query_groups=4", tp=4)],
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
