"""A model that costs little to compute and has the KV of SmolLM2-135M: as many layers, KV heads and bytes for
each token, and its tokenizer. Its weights are random; what it answers are words, since a token without text
would hide when it came.

With it a prompt's compute no longer hides what handing its KV over costs: what is moved is the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from kvhandoff.embedded.models import DEFAULT_MODEL, resolve_model
from kvhandoff.engine.fingerprint import user_cache

LIGHT_MODEL = "light"
_NARROW = {
    "hidden_size": 192,
    "num_attention_heads": 3,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
}
"""With the 3 KV heads of 64 and the 30 layers of SmolLM2-135M, which has 576, 9 and 1536 of these."""


def light_model() -> Path:
    """Its directory, made at the first call."""
    directory = user_cache() / "bench-light-model"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as made:
            _write(Path(made) / "model")
            os.replace(Path(made) / "model", directory)
    return directory


def _write(into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    full = resolve_model(DEFAULT_MODEL)
    shutil.copytree(full, into, ignore=shutil.ignore_patterns("*.safetensors*"))
    facts = json.loads((full / "config.json").read_text()) | _NARROW
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**facts), dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(full)
    words = [number for text, number in tokenizer.get_vocab().items() if re.fullmatch("Ġ[a-z]+", text)]
    silent = torch.ones(facts["vocab_size"], dtype=torch.bool)
    silent[words] = False
    model.lm_head.weight.data[silent] = 0  # the best of thousands of random words is above it
    model.save_pretrained(into)
