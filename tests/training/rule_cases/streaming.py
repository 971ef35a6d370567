"""Cases of the rules in rules/streaming.py."""

from rule_cases.experts import EP2
from rule_cases.kinds import LAYOUT, PP, Case, Cases, model

DEEP = {"world_size": 13, "global_batch_size": 26, "num_layers": 13}
DEEP = {**DEEP, "pipeline_model_parallel_size": 13, "target_device": "cuda"}
FULL = {"enable_full_hetero_dp": True}
STREAMED = {**FULL, "full_hetero_dp_schedule": "streamed"}
SEPARATED = {**FULL, "full_hetero_dp_schedule": "separated"}
AUTO = {**FULL, "full_hetero_dp_schedule": "auto"}
OFFLOADS = ("full_hetero_dp_cpu_offload", "offload_encoder_state")
VIRTUAL = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2}
VIRTUAL = {**PP, **VIRTUAL, "num_layers": 8, "overlap_p2p_comm": False}
FLUSH = {"overlap_p2p_comm_warmup_flush": True}


def _wide(encoder_tp: int, **mode: object) -> Case:
    """An encoder of a tensor parallel size, over 2 stages of 2 ranks each."""
    own = f"image_encoder.tensor_model_parallel_size={encoder_tp}"
    return model(own, tp=2, **LAYOUT, pipeline_model_parallel_size=2, **mode)


CASES: Cases = {
    "streamed-stages": (
        [_wide(4, **STREAMED)],
        [_wide(4, **AUTO), _wide(2, **STREAMED), _wide(1, **STREAMED)],
    ),
    "streamed-offload": (
        [{**STREAMED, name: True} for name in OFFLOADS],
        [
            *({**each, name: True} for each in (SEPARATED, AUTO) for name in OFFLOADS),
            {**STREAMED, "offload_encoder_activations": True},
        ],
    ),
    "streamed-overlap": (
        [{**STREAMED, **FLUSH}, {**STREAMED, **VIRTUAL}],
        [{**AUTO, **FLUSH}, {**AUTO, **VIRTUAL}, {**STREAMED, **VIRTUAL, "overlap_p2p_comm": True}],
    ),
    "communicators": (
        [{**STREAMED, **DEEP}],
        [
            *({**each, **DEEP} for each in (SEPARATED, AUTO)),
            {**STREAMED, **DEEP, "target_device": "cpu"},
        ],
    ),
}

WITH_EXPERTS: Cases = {
    "streamed-overlap": ([{**STREAMED, **EP2}], [{**AUTO, **EP2}]),
}

OMNI: Cases = {
    "streamed-encoders": (
        [
            model(f"audio_encoder.mode='{mode}'", **STREAMED)
            for mode in ("uniform", "encoder_hetero_dp")
        ],
        [STREAMED, model("audio_encoder.mode='uniform'", **FULL)],
    ),
}
