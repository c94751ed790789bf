"""The fingerprint of the model that a vLLM engine serves: the model's part of every token chain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvhandoff.core.errors import ConfigError
from kvhandoff.engine.fingerprint import model_fingerprint

_SAME_WEIGHTS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"})
"""Load formats that differ in how they read the directory's *.safetensors, not in what they read."""
_LOAD_FORMATS = sorted(_SAME_WEIGHTS | {"mistral", "dummy"})

_MODEL_FIELDS = (
    "quantization_config",
    "config_format",
    "hf_overrides",
    "model_impl",
    "model_class_overrides",
    "disable_sliding_window",
)
_MULTIMODAL_FIELDS = (
    "mm_processor_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_device_do_normalize",
)
_LORA_FIELDS = ("lora_dtype", "target_modules")
"""What vLLM is told, and KV depends on, by its configs' names; not every version has all of them."""

_SIDE_FILES = ("*.index.json", "*quant*.json", "params.json")
"""Beside config and weights: which weights are taken, and how they are quantised."""

_LENGTH_DECIDES = re.compile(r'"(longrope|su|dynamic|llama4\w*)"')
"""Kinds of rotary embedding, and of models, that vLLM makes differently for another `max_model_len`."""


def vllm_fingerprint(vllm_config: Any, find_snapshot: Any) -> str:
    """Equal on two engines only if the same tokens give the same KV: the model's files, and what vLLM was
    told to make of them.

    `find_snapshot(model, revision, download_dir)`: the directory of a model given by its Hugging Face id.
    Raises ConfigError for a model that can't be compared: its weights are no *.safetensors, or are read from
    elsewhere, its config is another directory's, or made by a function.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format not in _LOAD_FORMATS:
        allowed = ", ".join(_LOAD_FORMATS)
        raise ConfigError(f"load_format: got {load_format!r}, allowed are {allowed}, which can be compared")
    directory = Path(model.model)
    if not directory.is_dir():
        directory = Path(find_snapshot(model.model, model.revision, load.download_dir))
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"model: {directory} has no *.safetensors, allowed are weights that can be compared"
        )
    config_path = getattr(model, "hf_config_path", None)
    if config_path not in (None, model.model):
        raise ConfigError(f"hf_config_path: got {config_path!r}, allowed is a config beside the weights")
    if callable(model.hf_overrides):
        raise ConfigError("hf_overrides: got a function, allowed are values that can be compared")
    dummy = load_format == "dummy"
    lora = _fields(getattr(vllm_config, "lora_config", None), _LORA_FIELDS)
    told = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": None if model.quantization is None else str(model.quantization),
        "load_format": "weights" if load_format in _SAME_WEIGHTS else load_format,
        # Random weights: each rank draws its own part.
        "seed": (model.seed, vllm_config.parallel_config.tensor_parallel_size) if dummy else None,
        **_fields(model, _MODEL_FIELDS),
        "multimodal": _fields(getattr(model, "multimodal_config", None), _MULTIMODAL_FIELDS),
        "lora": {name: value for name, value in lora.items() if value != model.dtype},
        "files": dict(_side_files(directory, code=getattr(model, "trust_remote_code", False))),
    }
    config = (directory / "config.json").read_text()
    if _LENGTH_DECIDES.search(config + json.dumps(model.hf_overrides, default=str)):
        told["max_model_len"] = model.max_model_len
    variant = json.dumps(told, sort_keys=True, default=str)
    return f"vllm:{model_fingerprint(directory, variant)}"


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those that are set: an engine without them and one of a vLLM that doesn't know them are equal."""
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, {}, False)}


def _side_files(directory: Path, *, code: bool) -> Iterator[tuple[str, str]]:
    """Name and hash of each. `code`: vLLM may run Python that comes with the model."""
    for pattern in (*_SIDE_FILES, *(["*.py"] if code else [])):
        for path in directory.glob(pattern):
            yield path.name, blake2b(path.read_bytes(), digest_size=16).hexdigest()
