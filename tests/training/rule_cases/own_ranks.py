"""Cases of the rules in rules/own_ranks.py, of a run with one image encoder on ranks of its own.

The run has 8 ranks of the decoder, from 0 on, and 2 of the encoder behind them.
"""

from typing import Any

from rule_cases.kinds import LAYOUT

PLACED = {**LAYOUT, "ranks": 10}
APART = ("image_encoder.rank_offset=8", "image_encoder.data_parallel_size=2")
STAGES = ("image_encoder.rank_offset=8", "image_encoder.pipeline_model_parallel_size=2")
FLAGS = (
    *("enable_encoder_hetero_dp", "enable_full_hetero_dp", "use_vit_dp_balance"),
    *("full_hetero_dp_cpu_offload", "offload_encoder_activations", "offload_encoder_state"),
)

# Changes to the arguments, with the encoder apart: refused and valid. Where it lies with the
# decoder, these rules have nothing to say to any of them.
OWN_RANKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "own-ranks-world": (
        [
            {"ranks": 9, "world_size": 7, "global_batch_size": 14},
            {"ranks": 11, "world_size": 9, "global_batch_size": 18},
            {"ranks": 1, "world_size": -1},
        ],
        [{}],
    ),
    "own-ranks-modes": ([{name: True} for name in FLAGS], [{}]),
    "encoder-state": (
        [{"log_params_norm": True}, {"num_distributed_optimizer_instances": 2}],
        [{}],
    ),
    "unsupported": ([{"use_tp_pp_dp_mapping": True}], [{}]),
}

# Changes to the model and the number of ranks: refused and valid.
OWN_RANKS_OVERRIDES: dict[str, tuple[list[tuple[int, list[str]]], list[tuple[int, list[str]]]]] = {
    "own-ranks-offset": (
        [
            (10, ["image_encoder.rank_offset=0", "image_encoder.data_parallel_size=2"]),
            (10, ["image_encoder.rank_offset=-1", "image_encoder.data_parallel_size=2"]),
        ],
        [(10, [*APART])],
    ),
    "positive-sizes": (
        [(8, ["image_encoder.rank_offset=8", "image_encoder.data_parallel_size=0"])],
        [(9, ["image_encoder.rank_offset=8"])],
    ),
    "own-ranks-replicas": (
        [(8, ["image_encoder.data_parallel_size=2"])],
        [(8, ["image_encoder.data_parallel_size=1"])],
    ),
    "own-ranks-pipeline": (
        [
            (8, ["image_encoder.pipeline_model_parallel_size=2"]),
            (8, ["image_encoder.stage_layers=[2]"]),
        ],
        [(10, [*STAGES]), (10, [*STAGES, "image_encoder.stage_layers=[1,2]"])],
    ),
    "own-ranks-layers": (
        [
            (12, [APART[0], "image_encoder.pipeline_model_parallel_size=4"]),
            (10, [*STAGES, "image_encoder.stage_layers=[1,1]"]),
            (10, [*STAGES, "image_encoder.stage_layers=[3,0]"]),
            (10, [*STAGES, "image_encoder.stage_layers=[3]"]),
            (10, [*APART, "image_encoder.stage_layers=[1,2]"]),
        ],
        [(11, [APART[0], "image_encoder.pipeline_model_parallel_size=3"])],
    ),
    "own-ranks-modes": ([(10, [*APART, "image_encoder.mode='uniform'"])], [(10, [*APART])]),
    "encoder-sizes": (
        [
            (
                11,
                [
                    *("image_encoder.rank_offset=8", "image_encoder.num_attention_heads=4"),
                    "image_encoder.tensor_model_parallel_size=3",
                ],
            )
        ],
        [(10, ["image_encoder.rank_offset=8", "image_encoder.tensor_model_parallel_size=2"])],
    ),
}

# The same of a model that sees and hears.
OWN_RANKS_OMNI: dict[str, tuple[list[tuple[int, list[str]]], list[tuple[int, list[str]]]]] = {
    "own-ranks-modes": (
        [(9, ["image_encoder.rank_offset=8", "image_encoder.mode='full_hetero_dp'"])],
        [
            (9, ["image_encoder.rank_offset=8"]),
            (9, ["audio_encoder.rank_offset=8", "image_encoder.mode='full_hetero_dp'"]),
            (10, ["image_encoder.rank_offset=9", "audio_encoder.rank_offset=8"]),
        ],
    ),
    "own-ranks-placement": (
        [
            (10, ["image_encoder.rank_offset=8", "audio_encoder.rank_offset=8"]),
            (10, ["image_encoder.rank_offset=8", "audio_encoder.rank_offset=10"]),
            (
                11,
                [
                    *("image_encoder.rank_offset=8", "image_encoder.data_parallel_size=2"),
                    "audio_encoder.rank_offset=9",
                ],
            ),
        ],
        [
            (
                11,
                [
                    *("image_encoder.rank_offset=8", "image_encoder.data_parallel_size=2"),
                    "audio_encoder.rank_offset=10",
                ],
            )
        ],
    ),
}
