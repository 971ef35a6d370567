#!/usr/bin/env bash
# Continued pretraining of Qwen3-VL-30B-A3B, all weights, on nodes with 8 GPUs of 80 GB.
#
# One node:
#   MODEL_DIR=/models/Qwen3-VL-30B-A3B-Instruct TRAIN_DATA=/data/train.jsonl scripts/pretrain_qwen3_vl_30b_a3b.sh
# Four nodes, on each of them with its own NODE_RANK; all see the same folders:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 MODEL_DIR=... TRAIN_DATA=... scripts/pretrain_qwen3_vl_30b_a3b.sh
#
# Started again, it goes on from the last checkpoint. Arguments go to the training run: further
# flags, and overrides such as model.image_projector.freeze=true.
#
# Layout: the experts of a layer share out over the 8 GPUs of a node (EP), so that the exchange of
# tokens stays within it; everything else is split over TP. More nodes mean more replicas, over
# which the optimizer state is split; PP=2 halves what a GPU holds instead.
#
# MODE=full-hetero-dp has all GPUs encode images before the decoder's pipeline starts,
# MODE=encoder-hetero-dp those of each tensor parallel group, a microbatch each
# (docs/heterogeneous_parallelism.md).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

MODEL_DIR="${MODEL_DIR:?set MODEL_DIR to the Hugging Face folder of Qwen3-VL-30B-A3B}"
TRAIN_DATA="${TRAIN_DATA:?set TRAIN_DATA to a JSONL file}"
VALID_DATA="${VALID_DATA:-}" # JSONL of held-out samples, or nothing
OUTPUT_DIR="${OUTPUT_DIR:-runs/pretrain_qwen3_vl_30b_a3b}"

MODE="${MODE:-uniform}" # or encoder-hetero-dp, or full-hetero-dp

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
    model.image_encoder.recompute=true
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP:-2}"
    --pipeline-model-parallel-size "${PP:-1}"
    --sequence-parallel
    --expert-model-parallel-size "${EP:-8}"
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
case "$MODE" in
    uniform) ;;
    encoder-hetero-dp | full-hetero-dp) PARALLEL_ARGS+=("--enable-$MODE") ;;
    *)
        echo "MODE is $MODE: it has to be uniform, encoder-hetero-dp or full-hetero-dp" >&2
        exit 1
        ;;
esac
MOE_ARGS=(
    --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32
    # Experts are balanced over the whole global batch, as the model was trained.
    --moe-router-load-balancing-type global_aux_loss
    --moe-aux-loss-coeff "${AUX_LOSS:-1e-3}"
)
DATA_ARGS=(
    --train-data-path "$TRAIN_DATA"
    --seq-length "${SEQ_LENGTH:-8192}"
)
if [[ -n "$VALID_DATA" ]]; then
    DATA_ARGS+=(--valid-data-path "$VALID_DATA" --eval-interval 200 --eval-iters 10)
fi
TRAINING_ARGS=(
    --training-phase pretrain
    --bf16
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-256}"
    --train-iters "${TRAIN_ITERS:-10000}"
    --lr "${LR:-5e-5}"
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-fraction 0.03
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
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

export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun "${LAUNCH_ARGS[@]}" "$ROOT/loongplug/train.py" \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "$@"
