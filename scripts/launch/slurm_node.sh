#!/usr/bin/env bash
# One node's part of slurm.sbatch, which srun starts on every node: a launch script and its arguments.
# SIGTERM goes on to the run, and a run that ends by it has done what it should: another code would
# have srun kill the nodes that still save.
set -euo pipefail
export NODE_RANK="$SLURM_NODEID"
signals=0
trap 'signals=$((signals + 1)); kill -TERM "$run" 2>/dev/null || true' TERM
"$@" &
run=$!
before=""
while [[ "$before" != "$signals" ]]; do # a signal ends the wait, not the run
    before=$signals status=0
    wait "$run" || status=$?
done
if ((signals && status == 128 + 15)); then
    status=0
fi
exit "$status"
