from __future__ import annotations

import importlib
import json
import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.layout import KVLayout
from kvhandoff.engine.facts import EngineFacts
from kvhandoff.vllm.rank_channel import RankHello
from kvhandoff.vllm.settings import CLUSTER_KEY_ENV
from kvhandoff.vllm.worker_half import LoadResults
from tests.vllm_plugin import stub_vllm
from tests.vllm_plugin.fake_vllm import FakePool
from tests.vllm_plugin.stub_vllm import KVConnectorRole
from tests.vllm_plugin.test_settings import vllm_config

LAYOUT = KVLayout("order", "float32", 2, 2, 8, 16, 4096)


class FakeWorkerHalf:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.caches: Any = None
        self.ended: list[LoadResults] = []
        self.closed = False

    def register(self, caches: Any) -> None:
        self.caches = caches

    def handshake(self) -> RankHello:
        return hello()

    def results(self) -> LoadResults:
        return self.ended.pop(0) if self.ended else LoadResults()

    def close(self) -> None:
        self.closed = True


class FakeDriver:
    def __init__(self, settings: Any, facts: EngineFacts, core: Any) -> None:
        self.settings, self.facts, self.core = settings, facts, core
        self.running = False

    def start(self, make_mover: Any) -> None:
        self.running = True

    def close(self) -> None:
        self.running = False


def hello(rank: int = 0, ranks: int = 1) -> RankHello:
    layout = msgspec.structs.asdict(LAYOUT)
    return RankHello(
        engine_id="engine",
        rank=rank,
        ranks=ranks,
        address=f"ipc://{rank}",
        token=b"token",
        process=f"host/{rank}",
        kind="nixl",
        metadata=b"metadata",
        layout=layout,
        num_blocks=40,
    )


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """A connector changes its process's logging and switching of threads; here it is not vLLM's."""
    loggers = [logging.getLogger(name) for name in ("kvhandoff", "vllm")]
    kept = [(one, one.handlers, one.level, one.propagate) for one in loggers]
    interval = sys.getswitchinterval()
    yield
    for one, handlers, level, propagate in kept:
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)
    sys.setswitchinterval(interval)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    stub_vllm.install(monkeypatch, getattr(request, "param", "0.32.0"))
    monkeypatch.setenv(CLUSTER_KEY_ENV, "the key of these tests")
    made = importlib.import_module("kvhandoff.vllm.connector")
    monkeypatch.setattr(made, "WorkerHalf", FakeWorkerHalf)
    monkeypatch.setattr(made, "Driver", FakeDriver)
    monkeypatch.setattr(made, "cache_facts", lambda *_: "cache facts")
    return made


def config(tmp_path: Path | None = None) -> Any:
    made = vllm_config(
        parallel_config__rank=3,
        parallel_config__tensor_parallel_size=2,
        kv_transfer_config__kv_load_failure_policy="fail",
        model_config__served_model_name=["served", "alias"],
        model_config__max_model_len=512,
        model_config__dtype="torch.float32",
        model_config__quantization=None,
        model_config__hf_overrides={},
        model_config__seed=0,
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    if tmp_path is not None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        made.model_config.model = str(tmp_path)
    return made


def worker(module: Any) -> Any:
    return module.KVHandoffConnector(config(), KVConnectorRole.WORKER, None)


def scheduler(module: Any, tmp_path: Path, ranks: int = 1) -> Any:
    made = module.KVHandoffConnector(config(tmp_path), KVConnectorRole.SCHEDULER, None)
    made.bind_gpu_block_pool(FakePool(8))
    shakes = {rank: module.Handshake(hello(rank, ranks)) for rank in range(ranks)}
    made.set_xfer_handshake_metadata(pickle.loads(pickle.dumps(shakes)))
    return made


def test_it_is_known_by_its_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM runs plugins in every process, and more than once in some."""
    stub_vllm.install(monkeypatch, "9.9.9")  # others' vLLM may be of any version
    plugin = importlib.import_module("kvhandoff.vllm.plugin")
    plugin.register()
    plugin.register()
    named = {"KVHandoffConnector": ("kvhandoff.vllm.connector", "KVHandoffConnector")}
    assert stub_vllm.Factory.registered == named


@pytest.mark.parametrize("module", ["0.28.0", "0.33.0", "dev"], indirect=True)
@pytest.mark.parametrize("role", KVConnectorRole)
def test_other_versions_are_refused_at_the_start(module: Any, role: KVConnectorRole) -> None:
    with pytest.raises(ConfigError, match=r"allowed for KVHandoffConnector is 0\.29 to 0\.32"):
        module.KVHandoffConnector(config(), role, None)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_failed_load_is_computed_not_failed(module: Any, role: KVConnectorRole) -> None:
    vllm = config()
    module.KVHandoffConnector(vllm, role, None)
    assert vllm.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_its_log_is_shown_where_vllms_is(module: Any) -> None:
    ours, theirs = logging.getLogger("kvhandoff"), logging.getLogger("vllm")
    ours.handlers, theirs.handlers = [], [logging.NullHandler()]
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    for _ in range(2):
        module.KVHandoffConnector(config(), KVConnectorRole.WORKER, None)
    assert (ours.handlers, ours.level, ours.propagate) == (theirs.handlers, logging.INFO, False)


def test_a_worker_registers_its_rank(module: Any) -> None:
    made = worker(module)
    made.register_kv_caches({"layer": "tensor"})
    half = made._worker
    assert half.arguments[:4] == ("127.0.0.1:14579", 1, 2, b"the key of these tests")
    assert half.arguments[5] == "cache facts"
    assert half.caches == {"layer": "tensor"}
    assert made.get_handshake_metadata().hello == hello()
    made.shutdown()
    assert half.closed


def test_a_step_that_computes_comes_back_with_its_number(module: Any) -> None:
    made = worker(module)
    made.bind_connector_metadata(module.StepMetadata(7))
    done = pickle.loads(pickle.dumps(made.build_connector_worker_meta()))
    assert done == module.StepDone(7)
    made.bind_connector_metadata(module.StepMetadata(0))
    assert made.build_connector_worker_meta() is None


def test_ranks_answer_one_step_together(module: Any) -> None:
    one, other = module.StepDone(7), module.StepDone(6)
    assert one.aggregate(other) == other.aggregate(one) == other


def test_ended_loads_are_told_once(module: Any) -> None:
    made = worker(module)
    made._worker.ended = [LoadResults({"a", "b"}, {"b"}, {4, 5}), LoadResults({"c"}, set(), {6})]
    results = made.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"b"})
    assert made.get_block_ids_with_load_errors() == {4, 5}
    assert made.get_block_ids_with_load_errors() == set()
    assert made.get_finished(set()) == (None, {"c"})
    assert made.get_block_ids_with_load_errors() == {6}
    assert made.get_finished(set()) == (None, None)


def test_the_handoff_side_begins_when_all_ranks_have_registered(module: Any, tmp_path: Path) -> None:
    made = scheduler(module, tmp_path, ranks=2)
    driver = made._driver
    assert driver.running
    facts = driver.facts
    assert (facts.engine_id, facts.model, facts.integration) == ("127.0.0.1:14579", "served", "vllm")
    assert (facts.num_blocks, facts.processes) == (40, ("host/0", "host/1"))
    assert facts.about["vllm"] == "0.32.0"
    assert facts.about["ranks"] == "2"
    assert (driver.core.layout, driver.core.max_model_len) == (LAYOUT, 512)
    made.shutdown()
    assert not driver.running
    assert not driver.core.healthy


def test_what_decides_kv_is_in_the_fingerprint(module: Any, tmp_path: Path) -> None:
    def fingerprint(**changes: Any) -> str:
        vllm = config(tmp_path)
        for name, value in changes.items():
            part, _, attribute = name.partition("__")
            setattr(getattr(vllm, part) if attribute else vllm, attribute or part, value)
        found: str = module.vllm_fingerprint(vllm, module._find_snapshot)
        return found

    plain = fingerprint()
    assert plain.startswith("vllm:")
    for equal in (
        {"load_config__load_format": "safetensors"},
        {"model_config__max_model_len": 4096},
        {"model_config__hf_config_path": str(tmp_path)},
        {"parallel_config__tensor_parallel_size": 1},
        {"lora_config": SimpleNamespace(lora_dtype="torch.float32", target_modules=None)},
        {"model_config__model_class_overrides": {}},
    ):
        assert fingerprint(**equal) == plain
    others = [
        fingerprint(model_config__dtype="torch.bfloat16"),
        fingerprint(model_config__quantization="fp8"),
        fingerprint(model_config__quantization_config={"linear": "fp8"}),
        fingerprint(model_config__hf_overrides={"rope_theta": 5}),
        fingerprint(model_config__model_impl="transformers"),
        fingerprint(model_config__model_class_overrides={"Llama": "my.Llama"}),
        fingerprint(model_config__config_format="mistral"),
        fingerprint(model_config__multimodal_config=SimpleNamespace(video_pruning_rate=0.5)),
        fingerprint(lora_config=SimpleNamespace(lora_dtype="torch.bfloat16", target_modules=None)),
        fingerprint(load_config__load_format="mistral"),
        fingerprint(load_config__load_format="dummy"),
        fingerprint(load_config__load_format="dummy", model_config__seed=1),
        fingerprint(load_config__load_format="dummy", parallel_config__tensor_parallel_size=1),
    ]
    for name in ("model.safetensors.index.json", "hf_quant_config.json", "model.safetensors"):
        vllm = config(tmp_path)
        (tmp_path / name).write_text("another")
        others.append(module.vllm_fingerprint(vllm, None))
    before = fingerprint()
    (tmp_path / "modeling.py").write_text("pass")
    assert fingerprint() == before  # it is not run
    others.append(fingerprint(model_config__trust_remote_code=True))
    assert len({plain, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "config_json",
    [
        {"rope_scaling": {"rope_type": "longrope"}},
        {"rope_parameters": {"type": "su"}},
        {"model_type": "llama4"},
    ],
)
def test_where_it_decides_kv_the_longest_context_is_in_the_fingerprint(
    module: Any, tmp_path: Path, config_json: dict[str, Any]
) -> None:
    found = set()
    for length in (4096, 40_000):
        vllm = config(tmp_path)
        vllm.model_config.max_model_len = length
        (tmp_path / "config.json").write_text(json.dumps(config_json))
        found.add(module.vllm_fingerprint(vllm, None))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("load_config", "load_format", "pt", "load_format: got 'pt', allowed are auto, dummy, fast"),
        ("load_config", "load_format", "bitsandbytes", "load_format: got 'bitsandbytes'"),
        ("load_config", "load_format", "tensorizer", "load_format: got 'tensorizer'"),
        (
            "model_config",
            "hf_config_path",
            "/elsewhere",
            "hf_config_path: got ./elsewhere., allowed",
        ),
        ("model_config", "hf_overrides", lambda found: found, "hf_overrides: got a function"),
    ],
)
def test_models_that_cant_be_compared(
    module: Any, tmp_path: Path, part: str, name: str, value: Any, message: str
) -> None:
    vllm = config(tmp_path)
    setattr(getattr(vllm, part), name, value)
    with pytest.raises(ConfigError, match=message):
        module.vllm_fingerprint(vllm, None)


def test_weights_that_cant_be_compared(module: Any, tmp_path: Path) -> None:
    vllm = config(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        module.vllm_fingerprint(vllm, None)
