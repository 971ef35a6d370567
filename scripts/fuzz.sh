#!/usr/bin/env bash
# Training runs with faults in them: exceptions, killed ranks, full disks, signals, broken images, in
# random layouts and modes. Every run has to end by itself: with the losses of a run without faults,
# or with one error on all ranks and a checkpoint to go on from. Prints how to run a failure again.
#   ./scripts/fuzz.sh [--draws N] [--seed S] [--minutes M] [--jobs J] [--large] [--draw JSON]
#   ./scripts/fuzz.sh --placements N [--seed S]   steps of encoders on ranks of their own, without models
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment test
cd "$ROOT"
export OMP_NUM_THREADS=1 PYTHONPATH="$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}"
exec python tests/faults/fuzz_runs.py "$@"
