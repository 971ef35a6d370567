# What the launch scripts share. A script sets MODEL (its --model-name, or nothing where the folder says
# which model it is), FOLDER (what MODEL_DIR is a folder of) and PHASE, and sources this; then it adds what is its own to FLAGS, and ends with: launch "$@"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

MODEL_DIR="${MODEL_DIR:?set MODEL_DIR to the Hugging Face folder of $FOLDER}"
TRAIN_DATA="${TRAIN_DATA:?set TRAIN_DATA to a JSONL file}"
VALID_DATA="${VALID_DATA:-}" # JSONL of held-out samples, or nothing
OUTPUT_DIR="${OUTPUT_DIR:-runs/$(basename "$0" .sh)}"

# What is not given is taken from torchrun's own variables, which Kubeflow Trainer sets in each pod.
NNODES="${NNODES:-${PET_NNODES:-1}}"
GPUS_PER_NODE="${GPUS_PER_NODE:-${PET_NPROC_PER_NODE:-8}}"
NODE_RANK="${NODE_RANK:-${PET_NODE_RANK:-}}"
MASTER_ADDR="${MASTER_ADDR:-${PET_MASTER_ADDR:-}}"
MASTER_PORT="${MASTER_PORT:-${PET_MASTER_PORT:-29500}}"
if ((NNODES > 1)); then
    NODE_RANK="${NODE_RANK:?set NODE_RANK to the number of this node, 0 to NNODES - 1}"
    MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the host name of node 0}"
fi

LAUNCH_ARGS=(
    --nnodes "$NNODES"
    --node_rank "${NODE_RANK:-0}"
    --nproc_per_node "$GPUS_PER_NODE"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "$MASTER_PORT"
)
FLAGS=(
    --tokenizer-model "$MODEL_DIR"
    --load-hf "$MODEL_DIR"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --train-data-path "$TRAIN_DATA"
    --seq-length "${SEQ_LENGTH:-4096}"
    --training-phase "$PHASE"
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
    --load "$OUTPUT_DIR/checkpoints"
    --save "$OUTPUT_DIR/checkpoints"
    --save-interval "${SAVE_INTERVAL:-200}"
    --save-hf "$OUTPUT_DIR/hf"
    --metrics-json "$OUTPUT_DIR/metrics.json"
    --tensorboard-dir "$OUTPUT_DIR/tensorboard"
    --log-interval 1
)
# Rows of 1,000 tokens padded to 4,096 would be three quarters padding, which is computed like text.
case "${PACKING:-true}" in
    true)
        FLAGS+=(--packing)
        if [[ "${MICRO_BATCH_SIZE:-1}" != 1 ]]; then
            echo "MICRO_BATCH_SIZE is $MICRO_BATCH_SIZE, but a pack of samples is a microbatch by itself: leave" \
                "it out, and raise SEQ_LENGTH for more samples at once, or set PACKING=false" >&2
            exit 1
        fi
        ;;
    false) ;;
    *)
        echo "PACKING is $PACKING: it has to be true or false" >&2
        exit 1
        ;;
esac
if [[ -n "$MODEL" ]]; then
    FLAGS+=(--model-name "$MODEL")
fi
if [[ -n "$VALID_DATA" ]]; then
    FLAGS+=(--valid-data-path "$VALID_DATA" --eval-interval 200)
fi

# Adds what MODE asks for: uniform (the default), encoder-hetero-dp or full-hetero-dp.
add_mode() {
    case "${MODE:-uniform}" in
        uniform) ;;
        encoder-hetero-dp | full-hetero-dp) FLAGS+=("--enable-$MODE") ;;
        *)
            echo "MODE is $MODE: it has to be uniform, encoder-hetero-dp or full-hetero-dp" >&2
            exit 1
            ;;
    esac
}

# Adds what CP asks for: over how many GPUs each row's tokens are spread (1 unless given).
add_context() {
    if ((${CP:-1} != 1)); then
        FLAGS+=(--context-parallel-size "$CP")
    fi
}

# Adds whether the encoder with the YAML key $1 is frozen. One that trains keeps the inputs of its
# layers alone, and computes them again: else a few units of 4,096 patches take gigabytes.
add_freezing() {
    FLAGS+=("model.$1.freeze=${FREEZE_ENCODER:-true}")
    if [[ "${FREEZE_ENCODER:-true}" == false ]]; then
        FLAGS+=("model.$1.recompute=${RECOMPUTE_ENCODER:-true}")
    fi
}

# Adds where the encoder with the YAML key $1 lies: on ranks of its own from ENCODER_RANK_OFFSET on, as
# ENCODER_DP replicas of ENCODER_PP pipeline stages of ENCODER_TP ranks each.
add_placement() {
    if [[ -n "${ENCODER_RANK_OFFSET:-}" ]]; then
        FLAGS+=("model.$1.rank_offset=$ENCODER_RANK_OFFSET")
    fi
    if [[ -n "${ENCODER_DP:-}" ]]; then
        FLAGS+=("model.$1.data_parallel_size=$ENCODER_DP")
    fi
    if [[ -n "${ENCODER_TP:-}" ]]; then
        FLAGS+=("model.$1.tensor_model_parallel_size=$ENCODER_TP")
    fi
    if [[ -n "${ENCODER_PP:-}" ]]; then
        FLAGS+=("model.$1.pipeline_model_parallel_size=$ENCODER_PP")
    fi
}

# Adds what a model with 128 experts needs beside its layout.
add_experts() {
    FLAGS+=(
        --expert-tensor-parallel-size 1
        --moe-token-dispatcher-type alltoall
        --moe-router-dtype fp32
    )
    if ((NNODES * GPUS_PER_NODE < 16)); then
        # Sixteen GPUs hold gradients in fp32, eight do not. Nor do eight hold fp32 copies of all of
        # them, which Megatron's other optimizers make: this one, TransformerEngine's, takes them as
        # they are.
        FLAGS+=(--grad-reduce-in-bf16 --use-precision-aware-optimizer)
    fi
}

# The value of the run's flag $1, or $2: the last one of FLAGS and of the words behind.
given() {
    local name="$1" found="$2" before="" word
    for word in "${FLAGS[@]}" "${@:3}"; do
        if [[ "$before" == "$name" ]]; then found="$word"; fi
        if [[ "$word" == "$name="* ]]; then found="${word#*=}"; fi
        before="$word"
    done
    echo "$found"
}

# Warns where ranks of a pipeline wait for each other, as they have too few microbatches in a step.
warn_of_bubbles() {
    local tp pp cp batch micro ranks replicas
    tp=$(given --tensor-model-parallel-size 1 "$@") pp=$(given --pipeline-model-parallel-size 1 "$@")
    cp=$(given --context-parallel-size 1 "$@") micro=$(given --micro-batch-size 1 "$@")
    batch=$(given --global-batch-size 1 "$@")
    ranks="${ENCODER_RANK_OFFSET:-$((NNODES * GPUS_PER_NODE))}"
    replicas=$((ranks / (tp * pp * cp)))
    if ((pp > 1 && replicas > 0 && batch < 4 * pp * replicas * micro && ${NODE_RANK:-0} == 0)); then
        echo "A batch of $batch gives each of $replicas replicas $((batch / (replicas * micro))) microbatches for" \
            "$pp pipeline stages, which idle much with fewer than four for each stage: raise GLOBAL_BATCH_SIZE to" \
            "$((4 * pp * replicas * micro)), or lower PP" >&2
    fi
}

launch() {
    warn_of_bubbles "$@"
    export CUDA_DEVICE_MAX_CONNECTIONS="${CONNECTIONS:-1}"
    # Rows of all lengths leave holes in memory that comes in pieces of fixed sizes.
    if [[ -z "${PYTORCH_CUDA_ALLOC_CONF+given}" ]]; then
        export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF-expandable_segments:True}"
    fi
    exec python -m loongplug.parallel.launch "${LAUNCH_ARGS[@]}" "$ROOT/loongplug/train.py" \
        "${FLAGS[@]}" "$@"
}
