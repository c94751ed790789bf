"""Tiny random models with a tokenizer, written on the spot: complete enough for an OpenAI server to serve.

    model_dir = tiny_model("llama", tmp_path / "llama")   # a fresh directory
    model_dir = cached_tiny_model("llama")                # built once, shared by tests and processes

Hidden size 64, three layers, 4 query and 2 KV heads, context 8192, byte-level BPE of 384 tokens: every UTF-8
text can be encoded. Weights are drawn wide enough that attention matters, greedy outputs vary with the
prompt, and the best two logits are seldom close.
"""

from __future__ import annotations

import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
CONTEXT = 8192
EOS = "<|im_end|>"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# A window that is no multiple of a block, so that it starts inside one.
_MIXED_LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": _MOE,
    "mistral": {"sliding_window": 37},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "granite": {},
    "gemma3_text": {"sliding_window": 37, "layer_types": _MIXED_LAYERS},
    # Architectures an engine has to refuse.
    "gemma2": {"sliding_window": 37, "query_pre_attn_scalar": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 37},
    "qwen3_next": {
        **_MOE,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
}
_MODEL_TYPE = {"qwen2_sliding": "qwen2"}


def tiny_model(arch: str, path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of this architecture with its tokenizer to `path`, which it returns.

    `arch` is a transformers model type, or `qwen2_sliding`; `overrides` are set on its config. The same
    arguments give the same bytes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = _tokenizer()
    settings = {
        **_BASE,
        **_ARCHITECTURES[arch],
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        **overrides,
    }
    settings = {
        name: value for name, value in settings.items() if value is not None or name == "bos_token_id"
    }
    config = AutoConfig.for_model(_MODEL_TYPE.get(arch, arch), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_(0.0, 1.0)
            if not config.tie_word_embeddings:
                model.get_output_embeddings().weight.normal_(0.0, 0.5)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def cached_tiny_model(arch: str, *, seed: int = 0, **overrides: Any) -> Path:
    """The directory of `tiny_model(arch, …)` below `build/tinymodels`, written at the first call.

    Safe to call from several processes at once; treat it as read-only.
    """
    import transformers

    source = f"{Path(__file__).read_text()}{transformers.__version__}{seed}{sorted(overrides.items())}"
    name = f"{arch}-{blake2b(source.encode(), digest_size=6).hexdigest()}"
    root = Path(__file__).parents[1] / "build" / "tinymodels"
    final = root / name
    if not final.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        tiny_model(arch, draft, seed=seed, **overrides)
        try:
            draft.rename(final)
        except OSError:
            # Another process was first: a directory can't be renamed onto a full one.
            shutil.rmtree(draft)
            if not final.is_dir():
                raise
    return final


def _tokenizer() -> Any:
    """Byte-level BPE trained on a few fixed lines, so that common English is more than single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if bpe.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the tokenizer has {bpe.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the other dogs are watching from the garden.",
    "Prefill computes the keys and values of a prompt; decode makes one token after the other.",
    "user assistant system: what is the capital of France? The capital of France is Paris, on the Seine.",
    "There is nothing better than reading in the shade of an old tree when the summer is hot.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2024. Grüße aus Köln, ça va? Привет, мир! 你好，世界！",
]
