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
# The encoder is frozen; FREEZE_ENCODER=false trains all weights.
#
# Layout: two pipeline stages of two virtual chunks each, experts over 4 GPUs (EP), no TP. All GPUs
# encode images before the decoder's pipeline starts. One microbatch's forward runs together with
# another's backward, so that the tokens of the one travel while the other computes
# (docs/moe_overlap.md). More nodes mean more replicas.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

MODEL_DIR="${MODEL_DIR:?set MODEL_DIR to the Hugging Face folder of Qwen3-VL-30B-A3B}"
TRAIN_DATA="${TRAIN_DATA:?set TRAIN_DATA to a JSONL file}"
VALID_DATA="${VALID_DATA:-}" # JSONL of held-out samples, or nothing
OUTPUT_DIR="${OUTPUT_DIR:-runs/sft_qwen3_vl_30b_a3b_full_separation_overlap}"

NNODES="${NNODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
if ((NNODES > 1)); then
    NODE_RANK="${NODE_RANK:?set NODE_RANK to the number of this node, 0 to NNODES - 1}"
    MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the host name of node 0}"
fi

LAUNCH_ARGS=(
    --nnodes "$NNODES"
    --node_rank "${NODE_RANK:-0}"
    --nproc_per_node "$GPUS_PER_NODE"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-29500}"
)
MODEL_ARGS=(
    --model-name qwen3_vl_30b_a3b
    --tokenizer-model "$MODEL_DIR"
    --load-hf "$MODEL_DIR"
    "model.image_encoder.freeze=${FREEZE_ENCODER:-true}"
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank "${VPP:-2}"
    --expert-model-parallel-size "${EP:-4}"
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --enable-full-hetero-dp
)
OVERLAP_ARGS=(
    --overlap-moe-expert-parallel-comm
    --delay-wgrad-compute
)
# What is computed twice, and what leaves for the host. The article that this line is from offloads
# the norm's output in front of the experts; a2a_overlap_post_attn computes that once more, so what
# is kept, and can leave, is the norm's input.
ACTIVATION_ARGS=(
    --recompute-granularity selective
    --recompute-modules a2a_overlap_attn a2a_overlap_post_attn a2a_overlap_mlp
    --fine-grained-activation-offloading
    --offload-tensors dispatched_input pre_mlp_layernorm_input
)
MOE_ARGS=(
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
)
DATA_ARGS=(
    --train-data-path "$TRAIN_DATA"
    --seq-length "${SEQ_LENGTH:-4096}"
)
if [[ -n "$VALID_DATA" ]]; then
    DATA_ARGS+=(--valid-data-path "$VALID_DATA" --eval-interval 200 --eval-iters 10)
fi
TRAINING_ARGS=(
    --training-phase sft
    --bf16
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-64}"
    --train-iters "${TRAIN_ITERS:-1000}"
    --lr "${LR:-1e-5}"
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-fraction 0.03
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
if ((NNODES * GPUS_PER_NODE < 16)); then
    # Sixteen GPUs hold gradients in fp32, eight do not.
    TRAINING_ARGS+=(--grad-reduce-in-bf16)
fi
OUTPUT_ARGS=(
    --load "$OUTPUT_DIR/checkpoints"
    --save "$OUTPUT_DIR/checkpoints"
    --save-interval "${SAVE_INTERVAL:-200}"
    --save-hf "$OUTPUT_DIR/hf"
    --metrics-json "$OUTPUT_DIR/metrics.json"
    --tensorboard-dir "$OUTPUT_DIR/tensorboard"
    --log-interval 1
)

# Computation, the experts' exchange, the pipeline's transfers and copies each want a connection.
export CUDA_DEVICE_MAX_CONNECTIONS=32
exec torchrun "${LAUNCH_ARGS[@]}" "$ROOT/loongplug/train.py" \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${OVERLAP_ARGS[@]}" \
    "${ACTIVATION_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "$@"
