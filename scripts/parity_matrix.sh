#!/usr/bin/env bash
# Every cell of the parity matrix against a single rank (docs/parity.md). Pages go to
# runs/parity/pages. What was run before stays in runs/parity: an interrupted run goes on, and only
# changed code is run again.
#   ./scripts/parity_matrix.sh [--part layouts|hearing|savings|overlap|context|streamed|placements] [--jobs N] [--sample N [--seed S]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment demo
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
PYTHONPATH="$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}" exec python -m parity.matrix "$@"
