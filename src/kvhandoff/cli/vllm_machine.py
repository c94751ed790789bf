"""What engines of vLLM on one machine are given of it: GPUs, or, where there are none, cores and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"

_DEV = Path("/dev")
_OTHER_GPUS = ("kfd", "dxg")
"""Device files of AMD's GPUs, and of any under WSL. How many there are they don't say."""


def engine_environment(
    environment: Mapping[str, str], index: int, engines: int, *, dev: Path = _DEV
) -> dict[str, str]:
    """What to add to `environment` for engine `index` of `engines`; what is set there stays as it is.

    NVIDIA's GPUs are dealt out evenly; where there are fewer than engines, these share them, and need
    `--gpu-memory-utilization`. Without any GPU, the engines share the cores, and have 1 GiB of KV each.
    """
    gpus = _visible_gpus(environment, dev)
    if gpus:
        each = len(gpus) // engines
        return {VISIBLE: ",".join(gpus[index * each : (index + 1) * each])} if each else {}
    if VISIBLE not in environment and any((dev / name).exists() for name in _OTHER_GPUS):
        return {}
    usual = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Else all engines bind their threads to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // engines)),
    }
    return {name: value for name, value in usual.items() if name not in environment}


def _visible_gpus(environment: Mapping[str, str], dev: Path) -> list[str]:
    """As CUDA numbers them; found by their device files, since asking CUDA means to load it."""
    found = [str(index) for index, _ in enumerate(dev.glob("nvidia[0-9]*"))]
    if VISIBLE not in environment:
        return found
    chosen = (name.strip() for name in environment[VISIBLE].split(","))
    return [name for name in chosen if name and name != "-1"] if found else []
