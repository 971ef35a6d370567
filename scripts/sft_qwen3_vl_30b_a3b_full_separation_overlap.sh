#!/usr/bin/env bash
# SFT of Qwen3-VL-30B-A3B with full separation and the experts' exchange overlapped, on nodes with
# 8 GPUs of 80 GB.
#
# Four nodes, on each of them with its own NODE_RANK; all see the same folders:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 MODEL_DIR=/models/Qwen3-VL-30B-A3B-Instruct \
#       TRAIN_DATA=/data/train.jsonl scripts/sft_qwen3_vl_30b_a3b_full_separation_overlap.sh
# One node: the same without NNODES, NODE_RANK and MASTER_ADDR.
#
# Started again, it goes on from the last checkpoint. Arguments go to the training run: further
# flags, and overrides such as model.image_projector.freeze=true.
# The encoder is frozen; FREEZE_ENCODER=false trains all weights. Samples are packed into rows of
# SEQ_LENGTH tokens, which GLOBAL_BATCH_SIZE counts; PACKING=false gives each a row of its own.
#
# Layout: two pipeline stages of two virtual chunks each, experts over 4 GPUs (EP), no TP. All GPUs
# encode images before the decoder's pipeline starts. One microbatch's forward runs together with
# another's backward, so that the tokens of the one travel while the other computes
# (docs/moe_overlap.md). More nodes mean more replicas. CP=2 spreads each row's tokens over two GPUs
# (docs/context_parallelism.md).
set -euo pipefail
MODEL=qwen3_vl_30b_a3b FOLDER=Qwen3-VL-30B-A3B PHASE=sft
# Computation, the experts' exchange, the pipeline's transfers and copies each want a connection.
CONNECTIONS=32
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

add_freezing image_encoder
FLAGS+=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank "${VPP:-2}"
    --expert-model-parallel-size "${EP:-4}"
    --enable-full-hetero-dp
    --moe-router-load-balancing-type none
    --overlap-moe-expert-parallel-comm
    --delay-wgrad-compute
    # What is computed twice, and what leaves for the host. The article that this line is from
    # offloads the norm's output in front of the experts; a2a_overlap_post_attn computes that once
    # more, so what is kept, and can leave, is the norm's input.
    --recompute-granularity selective
    --recompute-modules a2a_overlap_attn a2a_overlap_post_attn a2a_overlap_mlp
    --fine-grained-activation-offloading
    --offload-tensors dispatched_input pre_mlp_layernorm_input
    # On where Apex is, whose kernel takes the weights of the model only.
    --no-gradient-accumulation-fusion
)
add_experts
add_context
launch "$@"
