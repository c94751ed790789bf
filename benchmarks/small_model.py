"""The model of the policy study: a random Llama of some 6 million weights, made by the benchmark itself.

Four engines share a small machine's cores in that study. With the default model a prompt would take seconds
there, and a study of some hundred requests hours. What the study is about is not in the weights: it is when
KV is there, and how busy the engine is that takes it. With this model a prompt of 1,000 tokens takes some
tenths of a second, longer than the router's picture of its engines is old, and a decode engine that computes
prompts of others meanwhile makes its own requests wait noticeably.

The output weights of all tokens that are no text of their own (special ones, parts of characters) are zero,
so that every token of an answer is content, and a first token is a first content.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.tinymodels import VOCAB_SIZE, tiny_model

from benchmarks.report import OUTPUT

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.08,
}
_NAME = "small-llama"


def small_model(shape: dict[str, Any] | None = None, root: Path = OUTPUT) -> Path:
    """Its directory, `root/small-llama`, written anew: the same arguments give the same bytes."""
    from safetensors.torch import load_file, save_file

    final = root / _NAME
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as draft:
        model_dir = tiny_model("llama", Path(draft) / _NAME, **(shape or SHAPE))
        [weights] = model_dir.glob("*.safetensors")
        tensors = load_file(weights)
        tensors["lm_head.weight"][_no_texts(model_dir)] = 0.0
        save_file(tensors, weights, metadata={"format": "pt"})
        shutil.rmtree(final, ignore_errors=True)
        model_dir.rename(final)
    return final


def _no_texts(model_dir: Path) -> list[int]:
    """Token ids that are no ASCII text by themselves."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = {token: tokenizer.decode([token], skip_special_tokens=True) for token in range(VOCAB_SIZE)}
    return [token for token, text in texts.items() if not (text and text.isascii())]
