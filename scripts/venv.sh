# Sourced by the other scripts: makes .venv if it is not there, installs LoongPlug with the extras
# in $1 (say "demo" or "test"), and puts the environment first on PATH.
# The installation is repeated only when pyproject.toml has changed, or when no earlier one had
# these extras: dev includes test, which includes demo.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

loongplug_environment() {
    local extras=$1 venv="$ROOT/.venv" python wanted covering name
    if [[ ! -x "$venv/bin/python" ]]; then
        python=$(cd "$ROOT" && command -v python3.12 || command -v python3 || true)
        if [[ -z "$python" ]] || ! (cd "$ROOT" && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'); then
            echo "LoongPlug needs Python 3.12 or later; none was found as python3.12 or python3." >&2
            return 1
        fi
        echo "making $venv with $("$python" --version)"
        (cd "$ROOT" && "$python" -m venv "$venv")
    fi
    export PATH="$venv/bin:$PATH"
    wanted=$(cat "$ROOT/pyproject.toml" | sha256sum)
    case "$extras" in
        demo) covering="demo test dev" ;;
        plots) covering="plots test dev" ;;
        test) covering="test dev" ;;
        *) covering=$extras ;;
    esac
    for name in $covering; do
        [[ "$(cat "$venv/.loongplug-$name" 2>/dev/null)" == "$wanted" ]] && return
    done
    echo "installing LoongPlug with its dependencies (a few minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$extras]"
    echo "$wanted" > "$venv/.loongplug-$extras"
}
