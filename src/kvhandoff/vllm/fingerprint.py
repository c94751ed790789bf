"""The fingerprint of the model that a vLLM engine serves: the model's part of every token chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvhandoff.core.errors import ConfigError
from kvhandoff.engine.fingerprint import model_fingerprint


def vllm_fingerprint(vllm_config: Any, find_snapshot: Any) -> str:
    """Equal on two engines only if the same tokens give the same KV: the model's files, and what vLLM was
    told to make of them.

    `find_snapshot(model, revision, download_dir)`: the directory of a model given by its Hugging Face id.
    Raises ConfigError for weights that are no files of a kind that can be compared.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    directory = Path(model.model)
    if not directory.is_dir():
        directory = Path(find_snapshot(model.model, model.revision, load.download_dir))
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"model: {directory} has no *.safetensors, allowed are weights that can be compared"
        )
    if callable(model.hf_overrides):
        raise ConfigError("hf_overrides: got a function, allowed are values that can be compared")
    told = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": None if model.quantization is None else str(model.quantization),
        "hf_overrides": model.hf_overrides,
        "load_format": "dummy" if str(load.load_format) == "dummy" else "weights",
        "seed": model.seed if str(load.load_format) == "dummy" else None,
    }
    variant = json.dumps(told, sort_keys=True, default=str)
    return f"vllm:{model_fingerprint(directory, variant)}"
