#!/usr/bin/env bash
# Make .venv if it is not there, install, and run the tests. Arguments go to pytest:
#   ./scripts/test.sh             everything, by processes that share the files of tests
#   ./scripts/test.sh --all       with sweeps that take minutes more
#   ./scripts/test.sh -m quick    the fast subset, in the same way
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment test
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ "${1:-}" == --all ]]; then
    export WHOLE_SWEEP=1
    shift
fi
# Files or names of tests: those that one looks at, in one process.
if (($#)) && [[ "$*" != "-m quick" ]]; then
    exec python -m pytest "$@"
fi

# One process more than there are cores: ranks wait for each other and for files much of the time.
cores=$(env -u OMP_NUM_THREADS nproc)
processes=$((cores < 8 ? cores + 1 : 8))
LOONGPLUG_TEST_SHARES=$(mktemp -d)
export LOONGPLUG_TEST_SHARES
others=()
trap 'kill "${others[@]}" 2> /dev/null || true; rm -rf "$LOONGPLUG_TEST_SHARES"' EXIT
for ((number = 2; number <= processes; number++)); do
    python -m pytest "$@" > "$LOONGPLUG_TEST_SHARES/$number.log" 2>&1 &
    others+=($!)
done
status=0
python -m pytest "$@" || status=$?
for other in "${others[@]}"; do
    wait "$other" || status=$?
done
for ((number = 2; number <= processes; number++)); do
    echo "Process $number:"
    cat "$LOONGPLUG_TEST_SHARES/$number.log"
done
exit "$status"
