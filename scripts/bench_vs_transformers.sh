#!/usr/bin/env bash
# One rank of LoongPlug against a plain transformers + torch training loop, side by side.
#   ./scripts/bench_vs_transformers.sh [--model qwen3_vl_tiny|llava_tiny] [--rounds N] [--steps N] [--threads N] [--json FILE]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment demo
cd "$ROOT"
DATA=runs/bench/data
[[ -f "$DATA/train.jsonl" ]] || python scripts/make_demo_data.py --out "$DATA"
PYTHONPATH="$ROOT/benchmarks${PYTHONPATH:+:$PYTHONPATH}" exec python -m micro.against_transformers "$DATA" "$@"
