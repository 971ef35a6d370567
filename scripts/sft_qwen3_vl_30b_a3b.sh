#!/usr/bin/env bash
# SFT of Qwen3-VL-30B-A3B, on nodes with 8 GPUs of 80 GB.
#
# One node:
#   MODEL_DIR=/models/Qwen3-VL-30B-A3B-Instruct TRAIN_DATA=/data/train.jsonl scripts/sft_qwen3_vl_30b_a3b.sh
# Four nodes, on each of them with its own NODE_RANK; all see the same folders:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 MODEL_DIR=... TRAIN_DATA=... scripts/sft_qwen3_vl_30b_a3b.sh
#
# Started again, it goes on from the last checkpoint. Arguments go to the training run: further
# flags, and overrides such as model.image_projector.freeze=true.
# The encoder is frozen; FREEZE_ENCODER=false trains all weights. Samples are packed into rows of
# SEQ_LENGTH tokens, which GLOBAL_BATCH_SIZE counts; PACKING=false gives each a row of its own.
#
# Layout: the experts of a layer share out over the 8 GPUs of a node (EP), so that the exchange of
# tokens stays within it; everything else is split over TP. More nodes mean more replicas, over
# which the optimizer state is split; PP=2 halves what a GPU holds instead.
#
# MODE=full-hetero-dp has all GPUs encode images before the decoder's pipeline starts,
# MODE=encoder-hetero-dp those of each tensor parallel group, a microbatch each
# (docs/heterogeneous_parallelism.md). CP=2 spreads each row's tokens over two GPUs, also without
# TransformerEngine (docs/context_parallelism.md).
set -euo pipefail
MODEL=qwen3_vl_30b_a3b FOLDER=Qwen3-VL-30B-A3B PHASE=sft
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

add_freezing image_encoder
FLAGS+=(
    --tensor-model-parallel-size "${TP:-2}"
    --pipeline-model-parallel-size "${PP:-1}"
    --sequence-parallel
    --expert-model-parallel-size "${EP:-8}"
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --moe-router-load-balancing-type none
)
add_experts
add_mode
add_context
add_placement image_encoder
launch "$@"
