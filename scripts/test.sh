#!/usr/bin/env bash
# Make .venv if it is not there, install, and run the tests. Arguments go to pytest:
#   ./scripts/test.sh             everything
#   ./scripts/test.sh -m quick    the fast subset
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
loongplug_environment test
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest "$@"
