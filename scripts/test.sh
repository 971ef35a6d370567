#!/usr/bin/env bash
# Make .venv if it is not there, install, and run the tests. Arguments go to pytest:
#   ./scripts/test.sh             everything, by two processes that share the files of tests
#   ./scripts/test.sh --all       with sweeps that take minutes more
#   ./scripts/test.sh -m quick    the fast subset, by two processes as well
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

LOONGPLUG_TEST_SHARES=$(mktemp -d)
export LOONGPLUG_TEST_SHARES
python -m pytest "$@" > "$LOONGPLUG_TEST_SHARES/second.log" 2>&1 &
second=$!
trap 'kill "$second" 2> /dev/null || true; rm -rf "$LOONGPLUG_TEST_SHARES"' EXIT
status=0
python -m pytest "$@" || status=$?
wait "$second" || status=$?
echo "The other process:"
cat "$LOONGPLUG_TEST_SHARES/second.log"
exit "$status"
