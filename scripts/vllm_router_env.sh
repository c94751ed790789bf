#!/usr/bin/env bash
# Makes .venv-vllm-router: the Rust router that `make bench-router` compares with, in an environment of its own, as
# it brings its own pins. Where it can't be installed, .venv-vllm-router/.impossible says why, and the benchmark
# measures kvhandoff alone.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=.venv-vllm-router
version=0.1.17

rm -f "$venv/.ready" "$venv/.impossible"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
if ! "$venv/bin/pip" install --quiet "vllm-router==$version" 2> "$venv/pip.log"; then
    reason=$(grep -m 1 '^ERROR' "$venv/pip.log" || tail -n 1 "$venv/pip.log")
    echo "vllm-router $version can't be installed here: ${reason#ERROR: }" | tee "$venv/.impossible"
    exit 0
fi
touch "$venv/.ready"
