from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.vllm.settings import CLUSTER_KEY_ENV, DURATIONS, ExtraConfig, check_version, plugin_settings


def vllm_config(**changes: Any) -> Any:
    """The parts of a `VllmConfig` that are read, by dotted name."""
    fields = {
        "kv_transfer_config": SimpleNamespace(
            kv_role="kv_both",
            kv_port=14579,
            engine_id="a1b2c3d4-0000-4000-8000-0123456789ab",
            kv_connector_extra_config={},
        ),
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes=1,
            data_parallel_size=1,
            data_parallel_index=0,
            data_parallel_external_lb=False,
        ),
        "model_config": SimpleNamespace(disable_cascade_attn=True),
        "speculative_config": None,
    }
    config = SimpleNamespace(**fields)
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        if attribute:
            setattr(getattr(config, part), attribute, value)
        else:
            setattr(config, part, value)
    return config


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.31.2+cpu", "0.32.0", "0.32.1rc1.dev3"])
def test_supported_versions(version: str) -> None:
    assert (0, 29) <= check_version(version) <= (0, 32)


@pytest.mark.parametrize("version", ["0.28.9", "0.33.0", "1.0", "dev", ""])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"vLLM: got version .*, allowed .* is 0\.29 to 0\.32"):
        check_version(version)


def test_an_engine_is_called_by_its_side_server_if_it_has_no_name() -> None:
    """vLLM makes another id up at each start; a name has to outlive the process."""
    assert plugin_settings(vllm_config()).engine_id == "127.0.0.1:14579"
    named = plugin_settings(vllm_config(kv_transfer_config__engine_id="decode-7"))
    assert (named.engine_id, named.port) == ("decode-7", 14579)


def test_ranks_that_are_servers_of_their_own() -> None:
    settings = plugin_settings(
        vllm_config(
            parallel_config__data_parallel_size=2,
            parallel_config__data_parallel_index=1,
            parallel_config__data_parallel_external_lb=True,
            kv_transfer_config__engine_id="a1b2c3d4-0000-4000-8000-0123456789ab_dp1",
        )
    )
    assert (settings.engine_id, settings.port) == ("127.0.0.1:14580", 14580)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_role: got 'kv_producer', allowed is 'kv_both'"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size: got 2, allowed is 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size: got 2"),
        ({"parallel_config__prefill_context_parallel_size": 4}, "prefill_context_parallel_size: got 4"),
        ({"parallel_config__tensor_parallel_size": 65}, "tensor_parallel_size: got 65, allowed is 1 to 64"),
        ({"kv_transfer_config__kv_port": 0}, "kv_port: got 0, allowed is 1 to 65535"),
        ({"kv_transfer_config__kv_port": 70000}, "kv_port: got 70000, allowed is 1 to 65535"),
        ({"kv_transfer_config__kv_port": "x"}, "kv_port: got 'x', allowed is a number, 1 to 65535"),
        ({"kv_transfer_config__kv_port": True}, "kv_port: got True, allowed is a number"),
        ({"kv_transfer_config__engine_id": 5}, "engine_id: got 5, allowed is a text"),
        ({"parallel_config__nnodes": 2}, "nnodes: got 2, allowed is 1"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size: got 2, allowed is 1, or a server"),
        ({"kv_transfer_config__engine_id": "x_dp0"}, "data_parallel_size: got 1, allowed is 1, or a server"),
        ({"speculative_config": object()}, "speculative_config: got 'one', allowed is 'none'|none"),
        ({"model_config__disable_cascade_attn": False}, "disable_cascade_attn: got False, allowed is True"),
    ],
)
def test_refused_deployments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plugin_settings(vllm_config(**changes))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hosts": "x"}, r"kv_connector_extra_config: .*`hosts`.*allowed are role, host"),
        *(
            ({"host": host}, f"host: got {host!r}, allowed is an address".replace(".", r"\."))
            for host in (
                "",
                " ",
                "0",
                "0.0",
                "0.0.0.0",
                "::",
                "::0",
                "::ffff:0.0.0.0",
                "a b",
                "-a",
                "http://a",
            )
        ),
        ({"backend": "TCP"}, r"Invalid enum value 'TCP'.*backend"),
        ({"role": "producer"}, r"Invalid enum value 'producer'.*role"),
        ({"offer_lease_s": 0}, "offer_lease_s: got 0.0, allowed is 0.1 to 2592000 seconds"),
        ({"claim_lease_s": float("inf")}, "claim_lease_s: got inf, allowed is 0.1 to 2592000 seconds"),
        ({"retain_fixed_s": 1e308}, r"retain_fixed_s: got 1e\+308"),
        ({"retain_lease_s": float("nan")}, "retain_lease_s: got nan"),
        ({"progress_s": 0.01}, "progress_s: got 0.01, allowed is 0.1 to 2592000 seconds"),
        ({"min_return_tokens": 0}, "min_return_tokens: got 0, allowed is 1 or more"),
        ({"control_port": 70000}, "control_port: got 70000, allowed is 0 to 65535"),
        ({"role": "decode", "register": ["r:1"]}, "register: got 'r:1'"),
        ({"register": ["http://r:1"], "register_url": "http://v:1"}, "register: got the role both"),
        ({"role": "decode", "register": ["http://r:1"]}, "register_url: got None"),
        ({"backend_options": {"x": 1}}, r"Expected `str`, got `int`.*backend_options"),
    ],
)
def test_refused_extra_config(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plugin_settings(vllm_config(kv_transfer_config__kv_connector_extra_config=extra))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "node-7", "node-7.example.org.", "a_b"])
def test_hosts(host: str) -> None:
    extra = {"host": host}
    config = vllm_config(kv_transfer_config__kv_connector_extra_config=extra)
    assert plugin_settings(config).extra.host == host


def test_durations_reach_the_protocol() -> None:
    given = {name: 3.0 + index for index, name in enumerate(DURATIONS)}
    assert ExtraConfig(**given).handoff == HandoffSettings(**given)
    assert ExtraConfig().handoff == HandoffSettings()


def test_the_cluster_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CLUSTER_KEY_ENV, raising=False)
    with pytest.raises(ConfigError, match="cluster key: none given; set \\$KVHANDOFF_CLUSTER_KEY"):
        ExtraConfig().cluster_key()
    monkeypatch.setenv(CLUSTER_KEY_ENV, "from the environment")
    assert ExtraConfig().cluster_key() == b"from the environment"
    file = tmp_path / "key"
    file.write_text("out of some file\n")
    assert ExtraConfig(cluster_key_file=str(file)).cluster_key() == b"out of some file"
    file.write_text("of this file\n")
    with pytest.raises(ConfigError, match="cluster key: got 12 bytes, allowed are 16 or more"):
        ExtraConfig(cluster_key_file=str(file)).cluster_key()
    with pytest.raises(ConfigError, match=r"cluster_key_file: .*/none can't be read \(No such file"):
        ExtraConfig(cluster_key_file=str(tmp_path / "none")).cluster_key()
