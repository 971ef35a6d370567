# Sourced by the other scripts: makes .venv if it is not there, installs LoongPlug with the extras
# in $1 (say "demo" or "test"), and puts the environment first on PATH.
# The installation is repeated only when pyproject.toml or the extras have changed.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

loongplug_environment() {
    local extras=$1 venv="$ROOT/.venv" python stamp wanted
    if [[ ! -x "$venv/bin/python" ]]; then
        python=$(cd "$ROOT" && command -v python3.12 || command -v python3 || true)
        if [[ -z "$python" ]] || ! (cd "$ROOT" && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'); then
            echo "LoongPlug needs Python 3.12 or later; none was found as python3.12 or python3." >&2
            return 1
        fi
        echo "making $venv with $("$python" --version)"
        (cd "$ROOT" && "$python" -m venv "$venv")
    fi
    stamp="$venv/.loongplug-$extras"
    wanted=$(cat "$ROOT/pyproject.toml" | sha256sum)
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
        echo "installing LoongPlug with its dependencies (a few minutes the first time)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$extras]"
        echo "$wanted" > "$stamp"
    fi
    export PATH="$venv/bin:$PATH"
}
