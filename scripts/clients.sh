#!/usr/bin/env bash
# Sets up clients that others have written, for tests/clients: `scripts/clients.sh [NAME ...]`, of litellm, aiperf,
# multi-turn and node; all of them by default. Each Python one has an environment of its own, .venv-clients-NAME, with the versions of
# tests/clients/pins/NAME.txt; Node's packages are in tests/clients/node. vLLM's clients are in .venv-vllm.
#
# Where one can't be installed (no network, no wheels for this platform), .venv-clients-NAME/.impossible says why, and
# its tests are skipped with that line.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}

in_venv() {
    local name=$1 pins=tests/clients/pins/$1.txt venv=.venv-clients-$1
    if [ "$venv/.ready" -nt "$pins" ]; then return; fi
    rm -f "$venv/.ready" "$venv/.impossible"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    if "$venv/bin/pip" install --quiet --no-deps --requirement "$pins" 2> "$venv/pip.log"; then
        touch "$venv/.ready"
    else
        local reason
        reason=$(grep -m 1 '^ERROR' "$venv/pip.log" || tail -n 1 "$venv/pip.log")
        echo "$name can't be installed here: ${reason#ERROR: }" | tee "$venv/.impossible"
    fi
}

# vLLM's benchmark of conversations imports vLLM too: its environment lies on top of .venv-vllm.
over_vllm() {
    local under=${KVHANDOFF_VLLM_PYTHON:-.venv-vllm/bin/python}
    if [ ! -x "$under" ]; then
        echo "there is no vLLM: its multi-turn benchmark is skipped"
        return
    fi
    in_venv multi-turn
    local where='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$under" -c "$where" > "$(.venv-clients-multi-turn/bin/python -c "$where")/vllm.pth"
}

in_node() {
    if ! command -v npm > /dev/null; then
        echo "there is no npm: the Node client is skipped"
    elif ! npm ci --prefix tests/clients/node --no-audit --no-fund --loglevel error; then
        echo "the Node client can't be installed here: it is skipped"
    fi
}

for name in "${@:-litellm aiperf multi-turn node}"; do
    for one in $name; do
        case $one in
            litellm | aiperf) in_venv "$one" ;;
            multi-turn) over_vllm ;;
            node) in_node ;;
            *)
                echo "clients: got $one, allowed are litellm, aiperf, multi-turn, node" >&2
                exit 2
                ;;
        esac
    done
done
