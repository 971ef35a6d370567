#!/usr/bin/env bash
# The main job on a laptop: make .venv if it is not there, install, train a small Qwen3-VL to read
# handwritten digits on 4 CPU ranks (TP2 x PP2, all of which encode images), export it in Hugging
# Face format, and evaluate the export on scans that were never trained on. Arguments go to the
# training run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment demo
cd "$ROOT"

RUN=runs/quickstart
DATA=$RUN/data
rm -rf "$RUN"
mkdir -p "$RUN"

echo "1/3 demo data: questions about scanned digits"
python scripts/make_demo_data.py --out "$DATA" --train 12000

PARALLEL_ARGS=(
    --device cpu
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
    --enable-full-hetero-dp
)
MODEL_ARGS=(
    --model-name qwen3_vl_tiny
    --tokenizer-model "$DATA/processor"
)
DATA_ARGS=(
    --train-data-path "$DATA/train.jsonl"
    --valid-data-path "$DATA/test.jsonl"
    --seq-length 48
)
# Four microbatches per step: each rank encodes the images of one.
TRAINING_ARGS=(
    --training-phase sft
    --micro-batch-size 8
    --global-batch-size 32
    --train-iters 500
    --lr 2e-3
    --min-lr 2e-5
    --lr-decay-style cosine
    --lr-warmup-iters 30
    --adam-beta2 0.95
    --weight-decay 0.01
    --clip-grad 1.0
    --eval-interval 250
    --eval-iters 4
)
OUTPUT_ARGS=(
    --log-interval 5
    --save "$RUN/checkpoints"
    --save-hf "$RUN/hf"
    --metrics-json "$RUN/metrics.json"
    --tensorboard-dir "$RUN/tensorboard"
)

echo "2/3 training on 4 ranks"
OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 loongplug/train.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "$@"

echo "3/3 evaluation of $RUN/hf on held-out scans"
loongplug eval --model "$RUN/hf" --data "$DATA/test.jsonl" --json "$RUN/metrics.json"
echo "metrics: $RUN/metrics.json"
cat "$RUN/metrics.json"
