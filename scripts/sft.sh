#!/usr/bin/env bash
# SFT of any model that LoongPlug trains, on nodes with 8 GPUs of 80 GB: the folder says which model it is.
#
# One node:
#   MODEL_DIR=/models/Qwen3-VL-8B-Instruct TRAIN_DATA=/data/train.jsonl scripts/sft.sh
# Four nodes, on each of them with its own NODE_RANK; all see the same folders:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 MODEL_DIR=... TRAIN_DATA=... scripts/sft.sh
#
# Started again, it goes on from the last checkpoint. Arguments go to the training run: further
# flags, and overrides such as model.image_projector.freeze=true.
# Encoders are frozen; FREEZE_ENCODER=false trains all weights. Samples are packed into rows of
# SEQ_LENGTH tokens, which GLOBAL_BATCH_SIZE counts; PACKING=false gives each a row of its own.
#
# TP has to divide the model's key and value heads and the widths of its MLPs: 4 at most for
# Qwen2.5-VL-7B, 8 for Qwen3-VL-8B. `loongplug estimate` tells the memory of any layout.
# A model with experts needs more flags: sft_qwen3_vl_30b_a3b.sh has them.
#
# MODE=full-hetero-dp has all GPUs encode images before the decoder's pipeline starts,
# MODE=encoder-hetero-dp those of each tensor parallel group, a microbatch each
# (docs/heterogeneous_parallelism.md). CP=2 spreads each row's tokens over two GPUs, also without
# TransformerEngine (docs/context_parallelism.md).
#
# ENCODER_RANK_OFFSET=6 gives the encoder the ranks from 6 on, ENCODER_DP replicas of ENCODER_PP
# pipeline stages of ENCODER_TP ranks (1 each unless given); the GPUs before them are the decoder's
# (docs/placement.md). Of a model that sees and hears it is the image encoder; overrides place the
# other one.
set -euo pipefail
MODEL="" FOLDER="the model" PHASE=sft
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ENCODERS=()
# Of images, of sounds, or of both: what the folder's config.json has.
for encoder in image_encoder:vision_config audio_encoder:audio_config; do
    if grep -qs "\"${encoder#*:}\"" "$MODEL_DIR/config.json"; then
        ENCODERS+=("${encoder%:*}")
        add_freezing "${encoder%:*}"
        # Over more ranks an encoder's matrices are small, and of widths that no kernel likes.
        if ((${TP:-2} > 2 && ${TP:-2} % 2 == 0)) && [[ "${MODE:-uniform}" == uniform ]] &&
            [[ -z "${ENCODER_TP:-}${ENCODER_RANK_OFFSET:-}" ]]; then
            FLAGS+=("model.${encoder%:*}.tensor_model_parallel_size=2")
        fi
    fi
done
FLAGS+=(
    --tensor-model-parallel-size "${TP:-2}"
    --pipeline-model-parallel-size "${PP:-1}"
    --sequence-parallel
)
add_mode
add_context
add_placement "${ENCODERS[0]:-image_encoder}"
launch "$@"
