"""What load_runner refuses, and what it reads from a model's directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded import selfcheck
from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.attention import UnsupportedAttention
from kvhandoff.embedded.runner import DEFAULT_KV_BYTES, TorchRunner, load_runner
from tests.embedded.runners import NUM_BLOCKS, plain_model, runner_of, scratch_region
from tests.tinymodels import CONTEXT, VOCAB_SIZE, cached_tiny_model, tiny_model


def load(directory: Path, **options: Any) -> TorchRunner:
    if "kv_bytes" not in options:
        options.setdefault("num_blocks", 2)
    return load_runner(directory, region_factory=scratch_region, **options)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may spoil."""
    return Path(shutil.copytree(cached_tiny_model("llama"), tmp_path / "llama"))


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_pool_that_does_not_fit_is_refused_before_the_weights_are_read(llama: Path):
    for file in llama.glob("*.safetensors"):
        file.unlink()  # whoever reads them fails
    with pytest.raises(ConfigError, match=r"KV pool: 1099511627776 blocks of .*, memory available is"):
        load(llama, num_blocks=2**40)


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("lfm2", r"Lfm2ForCausalLM can't be served: it has layers of type conv"),
        ("qwen3_next", r"Qwen3NextForCausalLM can't be served: it has layers of type linear_attention"),
        ("gemma2", r"Gemma2ForCausalLM can't be served: its attention uses softcap"),
        ("gpt_oss", r"GptOssForCausalLM can't be served: its attention uses s_aux"),
        ("deepseek_v3", r"DeepseekV3ForCausalLM can't be served: its keys are .* KV pool has 4 heads of 8"),
    ],
)
def test_architectures_that_would_be_served_wrongly_are_refused(arch: str, why: str):
    with pytest.raises(ConfigError, match=why):
        load(cached_tiny_model(arch))


@pytest.mark.parametrize("arch", ["lfm2", "qwen3_next"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_another_kind_are_found_by_the_probe_too(
    arch: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(selfcheck, "check_config", lambda config: None)
    monkeypatch.setattr(selfcheck.Probe, "_check_windows", lambda self, runner: None)
    with pytest.raises(ConfigError, match="its logits through the KV pool are off by"):
        load(cached_tiny_model(arch), dtype=dtype)


def test_the_window_that_layers_use_must_be_the_configs():
    runner = runner_of("qwen2_sliding")
    probe = selfcheck.Probe.of(plain_model("qwen2_sliding"))
    probe._check_windows(runner_with_windows(runner, {0: None, 1: 37, 2: 37}))
    wrongs: list[dict[int, int | None]] = [
        {0: None, 1: 37, 2: None},
        {0: 37, 1: 37, 2: 37},
        {0: None, 1: 37},
        {0: None, 1: 36, 2: 37},
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="its layers ask for windows"):
            probe._check_windows(runner_with_windows(runner, wrong))


def runner_with_windows(runner: TorchRunner, windows: dict[int, int | None]) -> Any:
    class Windows:
        layout = runner.layout

    Windows.windows = windows  # type: ignore[attr-defined]
    return Windows()


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_logits_that_are_a_little_off_are_refused(error: float, monkeypatch: pytest.MonkeyPatch):
    forward = TorchRunner.forward

    def slightly_wrong(self: TorchRunner, steps: Any) -> Any:
        every: list[Any] = forward(self, steps)
        return [logits + error * logits.roll(1) for logits in every]

    load(cached_tiny_model("llama"))
    monkeypatch.setattr(TorchRunner, "forward", slightly_wrong)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM can't be served: its logits .* are off by"):
        load(cached_tiny_model("llama"))


def test_layers_that_fail_on_paged_attention_are_refused(monkeypatch: pytest.MonkeyPatch):
    def failing(self: TorchRunner, steps: Any) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setattr(TorchRunner, "forward", failing)
    with pytest.raises(ConfigError, match=r"it fails on paged attention: AttributeError\('no such thing'\)"):
        load(cached_tiny_model("llama"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of type chunked_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], why: str):
    config = AutoConfig.from_pretrained(cached_tiny_model("llama"))
    selfcheck.check_config(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=why):
        selfcheck.check_config(config)


def test_a_config_that_does_not_say_how_long_a_context_may_be_is_refused():
    config = SimpleNamespace(model_type="odd", vocab_size=9, num_hidden_layers=1, num_attention_heads=1)
    config.get_text_config = lambda decoder: config
    with pytest.raises(
        ConfigError, match="odd can't be served: its config doesn't say max_position_embeddings"
    ):
        selfcheck.check_config(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype: got 'int8', allowed is auto, float32, bfloat16, float16"),
        ({"num_blocks": 0}, "num_blocks: got 0, allowed is 1 or more"),
        (
            {"kv_bytes": 1000},
            r"kv-memory, block-size: got 9.31e-07 GiB and blocks of 16 tokens, allowed is 0.001 GiB or more",
        ),
        ({"kv_bytes": 10**6, "num_blocks": 4}, "num_blocks and kv_bytes: give one of them"),
        ({"block_size": 0}, "block-size: got 0, allowed is 1 or more"),
        (
            {"block_size": CONTEXT + 1},
            f"block-size: got {CONTEXT + 1}, allowed is up to .*, {CONTEXT} tokens",
        ),
        ({"block_size": 24, "exact": True}, "block-size: got 24, allowed is a divisor of 512 in exact mode"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load(cached_tiny_model("llama"), **options)


@pytest.mark.parametrize("name", ["banana", "", "cuda:x", "mps", "meta"])
def test_only_known_devices_are_allowed(name: str):
    with pytest.raises(ConfigError, match=f"^device: got '{name}', allowed is cpu, cuda$"):
        load(cached_tiny_model("llama"), device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="device: got 'cuda', but torch finds no CUDA device"):
        load(cached_tiny_model("llama"), device="cuda")


def test_the_size_of_the_pool():
    directory = cached_tiny_model("llama")
    assert load(directory, kv_bytes=100_000, dtype="float32").region.num_blocks == 100_000 // 12288
    assert load(directory, kv_bytes=None, dtype="bfloat16").region.num_blocks == DEFAULT_KV_BYTES // 6144
    assert load(directory, block_size=4, dtype="float32").layout.block_bytes == 12288 // 4


def test_a_weight_that_is_missing_is_an_error_not_a_random_number(llama: Path):
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 tensors .*: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(llama)


def test_a_truncated_weight_file_is_an_error(llama: Path):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="can't be loaded"):
        load(llama)


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "no_such_type"}, {"model_type": "t5"}, {"hidden_size": "wide"}, {"hidden_size": 63}],
)
def test_a_config_of_no_language_model_is_an_error(llama: Path, changes: dict[str, Any]):
    change_json(llama / "config.json", **changes)
    with pytest.raises(ConfigError, match="model: "):
        load(llama)


def test_what_the_runner_knows_of_its_model(llama: Path):
    runner = load(llama)
    assert runner.vocab_size == VOCAB_SIZE
    assert runner.max_context == CONTEXT
    assert runner.eos_token_ids == {2}
    change_json(llama / "generation_config.json", eos_token_id=[2, 0, 5])
    assert load(llama).eos_token_ids == {0, 2, 5}
    (llama / "generation_config.json").unlink()
    assert load(llama).eos_token_ids == {2}


def test_auto_is_the_checkpoints_own_dtype(tmp_path: Path, llama: Path):
    assert load(llama, dtype="auto").layout.dtype == "float32"
    change_json(llama / "config.json", dtype="bfloat16")
    assert load(llama, dtype="auto").layout.dtype == "bfloat16"
    assert load(llama, dtype="auto", exact=True).layout.dtype == "float32"


def test_engines_share_a_fingerprint_only_when_their_kv_is_alike(tmp_path: Path):
    one = runner_of("llama")
    assert load(cached_tiny_model("llama"), dtype="float32").model_fingerprint == one.model_fingerprint
    others = [
        load(cached_tiny_model("llama"), dtype="bfloat16"),
        load(cached_tiny_model("llama"), exact=True),
        load(tiny_model("llama", tmp_path / "other", seed=1)),
    ]
    assert len({one.model_fingerprint, *(other.model_fingerprint for other in others)}) == 4


def test_a_sliding_window_is_asked_for_by_the_layers_that_have_one():
    runner = runner_of("qwen2_sliding")
    runner.forward([SequenceStep([1], 0, [NUM_BLOCKS - 1], None)])
    assert runner.windows == {0: None, 1: 37, 2: 37}


def test_arguments_that_change_attention_are_not_ignored():
    runner = runner_of("llama")
    layer = runner._model.model.layers[0].self_attn
    with pytest.raises(UnsupportedAttention, match="don't pass keyword arguments"):
        layer(torch.zeros(1, 1, 64), position_embeddings=(torch.ones(1, 1, 16), torch.zeros(1, 1, 16)))
