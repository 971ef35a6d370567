#!/usr/bin/env bash
# The main job on a laptop: make .venv if it is not there, install, train a small Qwen3-VL to read
# handwritten digits on 4 CPU ranks (PP2 x DP2, all of which encode images), teach it another kind
# of question with a frozen encoder in another mode and layout (TP2 x DP2, heterogeneous DP), export
# in Hugging Face format, and evaluate the export with both kinds on scans that were never trained
# on. Arguments go to both training runs. Four minutes on two cores, behind the installation.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment demo
cd "$ROOT"
SECONDS=0

RUN=runs/quickstart
DATA=$RUN/data
if [ -e "$RUN" ]; then
    # Its checkpoints would be gone on with, and users may have added files to it.
    kept=$RUN.$(date +%Y%m%d-%H%M%S)
    mv "$RUN" "$kept"
    echo "the run before is kept in $kept; remove it when you like"
fi
mkdir -p "$RUN"

echo "1/4 demo data: questions about scanned digits"
python scripts/make_demo_data.py --out "$DATA" --train 13440 --variants 24
python scripts/make_demo_data.py --out "$DATA" --train 4000 --test 250 --new-questions
cat "$DATA/test.jsonl" "$DATA/new_test.jsonl" >"$DATA/held_out.jsonl"

MODEL_ARGS=(
    --device cpu
    --model-name qwen3_vl_tiny
    --tokenizer-model "$DATA/processor"
)
TRAINING_ARGS=(
    --training-phase sft
    --seq-length 48
    --micro-batch-size 8
    --global-batch-size 32
    --min-lr 2e-5
    --lr-decay-style cosine
    --adam-beta2 0.95
    --weight-decay 0.01
    --clip-grad 1.0
    --use-distributed-optimizer
    --log-interval 5
    --metrics-json "$RUN/metrics.json"
    --tensorboard-dir "$RUN/tensorboard"
)

# Two microbatches per step and replica: each rank encodes the images of one.
FIRST_PHASE=(
    --train-data-path "$DATA/train.jsonl"
    --valid-data-path "$DATA/test.jsonl"
    --pipeline-model-parallel-size 2
    --enable-full-hetero-dp
    --train-iters 480
    --lr 2e-3
    --lr-warmup-iters 30
    --eval-interval 480
    --save "$RUN/checkpoints"
)

# The weights of the first phase, sharded again; the ranks of a tensor parallel group encode in turn.
# Six of ten samples ask as before, so that nothing is forgotten.
SECOND_PHASE=(
    --train-data-path 0.6 "$DATA/train.jsonl" 0.4 "$DATA/new_train.jsonl"
    --valid-data-path "$DATA/test.jsonl" "$DATA/new_test.jsonl"
    --tensor-model-parallel-size 2
    --enable-encoder-hetero-dp
    --load "$RUN/checkpoints"
    --finetune
    --train-iters 220
    --lr 1e-3
    --eval-interval 220
    --save "$RUN/sft"
    --save-hf "$RUN/hf"
    --metrics-name second_phase
    model.image_encoder.freeze=True
)

train() {
    OMP_NUM_THREADS=1 python -m loongplug.parallel.launch --standalone --nproc_per_node 4 loongplug/train.py \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "$@"
}

echo "2/4 training on 4 ranks: all encode (PP2 x DP2)"
train "${FIRST_PHASE[@]}" "$@"

echo "3/4 SFT on new questions from that checkpoint with a frozen encoder (TP2 x DP2)"
train "${SECOND_PHASE[@]}" "$@"

echo "4/4 evaluation of $RUN/hf on held-out scans, both kinds of questions"
loongplug eval --model "$RUN/hf" --data "$DATA/held_out.jsonl" --json "$RUN/metrics.json"
echo "metrics: $RUN/metrics.json; $SECONDS s from the end of the installation"
cat "$RUN/metrics.json"
