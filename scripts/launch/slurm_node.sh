#!/usr/bin/env bash
# One node's part of slurm.sbatch, which srun starts on every node: a launch script and its arguments.
# SIGTERM goes on to the run, and a run that ends by it has done what it should: another code would
# have srun kill the nodes that still save.
set -euo pipefail
export NODE_RANK="$SLURM_NODEID"
signals=0 early=0 run=""
pass_on() {
    signals=$((signals + 1))
    if [[ -n "$run" ]]; then kill -TERM "$run" 2>/dev/null || true; else early=1; fi
}
trap pass_on TERM
"$@" &
run=$!
if ((early)); then kill -TERM "$run" 2>/dev/null || true; fi # came before the run had a number
before=""
while [[ "$before" != "$signals" ]]; do # a signal ends the wait, not the run
    before=$signals status=0
    wait "$run" || status=$?
done
if ((signals && status == 128 + 15)); then
    status=0
fi
exit "$status"
