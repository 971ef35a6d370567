#!/usr/bin/env bash
# Uniform, uniform tuned, heterogeneous TP and DP, full separation and an encoder on a rank of its own, side
# by side on the CPU: same model, data, weights and ranks, one thread each. Takes some ten minutes.
#   ./scripts/bench_levels.sh [--rounds N] [--json FILE] [--pictures DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment plots
cd "$ROOT"
OMP_NUM_THREADS=1 exec python benchmarks/bench.py levels "$@"
