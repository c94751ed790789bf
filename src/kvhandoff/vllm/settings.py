"""What an operator may set in `kv_transfer_config`, checked; and which deployments are served."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvhandoff.core.errors import ConfigError
from kvhandoff.engine.register import check_registration
from kvhandoff.handoff.settings import MIN_RETURN_TOKENS, HandoffSettings
from kvhandoff.handoff.signing import check_cluster_key
from kvhandoff.transport.nixl_agent import Backend
from kvhandoff.transport.planes import NIXL_LANES, PlaneOptions
from kvhandoff.transport.ranks import MAX_RANKS

CLUSTER_KEY_ENV = "KVHANDOFF_CLUSTER_KEY"

SUPPORTED = ((0, 29), (0, 32))
"""The first and the last minor version of vLLM that this connector was made for."""

DURATIONS = (
    "offer_lease_s",
    "claim_lease_s",
    "retain_lease_s",
    "retain_fixed_s",
    "handshake_s",
    "claim_s",
    "read_s",
    "rendezvous_s",
    "progress_s",
)
"""The protocol's durations that an operator may set, by their names in `HandoffSettings`."""

DURATION_S = (0.1, 30 * 86400.0)
"""The shortest and the longest of them."""

_USUAL = HandoffSettings()

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")

_GENERATED_ID = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")
"""What vLLM gives as engine id when the operator names none: another one at each start."""


class ExtraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_transfer_config.kv_connector_extra_config`."""

    role: Literal["prefill", "decode", "both"] = "both"
    """What the router may use this engine for."""
    host: str = "127.0.0.1"
    """Where the side server listens for the router, and the control plane for other engines."""
    control_port: int = 0
    """Of the control plane; 0 takes a free one."""
    cluster_key_file: str | None = None
    """File with the key that router and engines share; else $KVHANDOFF_CLUSTER_KEY."""
    backend: Backend = "UCX"
    """NIXL's backend."""
    backend_options: dict[str, str] = {}
    """The backend's own parameters, by NIXL's names."""
    lanes: int = NIXL_LANES
    """Transfers that run side by side, of each rank."""
    offer_lease_s: float = _USUAL.offer_lease_s
    claim_lease_s: float = _USUAL.claim_lease_s
    retain_lease_s: float = _USUAL.retain_lease_s
    retain_fixed_s: float = _USUAL.retain_fixed_s
    handshake_s: float = _USUAL.handshake_s
    claim_s: float = _USUAL.claim_s
    read_s: float = _USUAL.read_s
    rendezvous_s: float = _USUAL.rendezvous_s
    progress_s: float = _USUAL.progress_s
    min_return_tokens: int = MIN_RETURN_TOKENS
    """With fewer to gain, a history is computed, not read."""
    register: tuple[str, ...] = ()
    """Routers' URLs that this engine registers with, as what `role` says."""
    register_url: str | None = None
    """Where those routers reach vLLM's own server, which the connector does not know."""

    @property
    def handoff(self) -> HandoffSettings:
        """The protocol's durations."""
        return HandoffSettings(**{name: getattr(self, name) for name in DURATIONS})

    @property
    def plane(self) -> PlaneOptions:
        """Each rank's data plane. Raises ConfigError."""
        return PlaneOptions(backend=self.backend, lanes=self.lanes, options=self.backend_options)

    def cluster_key(self) -> bytes:
        """The key of this cluster. Raises ConfigError when there is none."""
        if self.cluster_key_file is not None:
            try:
                key = Path(self.cluster_key_file).read_bytes().strip()
            except OSError as error:
                raise ConfigError(
                    f"cluster_key_file: {self.cluster_key_file} can't be read ({error.strerror})"
                ) from error
        else:
            key = os.environ.get(CLUSTER_KEY_ENV, "").encode()
        return check_cluster_key(key, set_by=f"${CLUSTER_KEY_ENV}, or cluster_key_file in the extra config")


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's, the same in all of its processes."""

    engine_id: str
    port: int
    """Of the side server."""
    extra: ExtraConfig


def plugin_settings(vllm_config: Any) -> PluginSettings:
    """Read `VllmConfig`. Raises ConfigError for what can't be served, naming value and allowed values."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if type(transfer.kv_port) is not int:  # a bool is none
        raise _refused("kv_port", transfer.kv_port, "a number, 1 to 65535")
    if not isinstance(transfer.engine_id, str | None):
        raise _refused("engine_id", transfer.engine_id, "a text")
    extra = _extra(transfer.kv_connector_extra_config)
    _check_deployment(vllm_config)
    port = transfer.kv_port + parallel.data_parallel_index
    if not 1 <= port < 2**16:
        raise _refused("kv_port", transfer.kv_port, "1 to 65535, with the data parallel rank added to it")
    engine_id = transfer.engine_id or ""
    named = re.sub(r"(_dp\d+)+$", "", engine_id)
    if not named or _GENERATED_ID.fullmatch(named):
        engine_id = f"{extra.host}:{port}"
    return PluginSettings(engine_id=engine_id, port=port, extra=extra)


def check_version(version: str) -> tuple[int, int]:
    """vLLM's (major, minor). Raises ConfigError for one that this connector was not made for."""
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else None
    first, last = SUPPORTED
    if minor is None or not first <= minor <= last:
        allowed = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        raise ConfigError(f"vLLM: got version {version}, allowed for KVHandoffConnector is {allowed}")
    return minor


def _extra(given: dict[str, Any]) -> ExtraConfig:
    try:
        extra = msgspec.convert(given, ExtraConfig)
    except msgspec.ValidationError as error:
        names = ", ".join(ExtraConfig.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config: {error}; allowed are {names}") from error
    if not _is_one_host(extra.host):
        raise _refused("host", extra.host, "an address of this host that router and engines reach it at")
    shortest, longest = DURATION_S
    for name in DURATIONS:
        if not shortest <= getattr(extra, name) <= longest:
            raise _refused(name, getattr(extra, name), f"{shortest:g} to {longest:.0f} seconds")
    if extra.min_return_tokens < 1:
        raise _refused("min_return_tokens", extra.min_return_tokens, "1 or more")
    check_registration(extra.register, extra.role, extra.register_url)
    if extra.register and extra.register_url is None:
        raise _refused("register_url", None, "with register, the URL of vLLM's own server")
    if not 0 <= extra.control_port < 2**16:
        raise _refused("control_port", extra.control_port, "0 to 65535")
    return extra


def _is_one_host(host: str) -> bool:
    """Whether it is an address, or a name, that others can reach one host at."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None and not _is_short_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return not (mapped or address).is_unspecified


def _is_short_address(host: str) -> bool:
    """`0`, `0x7f.1`, …: the system takes them for IPv4 addresses."""
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True


def _check_deployment(vllm_config: Any) -> None:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role != "kv_both":
        raise _refused("kv_role", transfer.kv_role, "'kv_both': the router says per request who does what")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise _refused(name, getattr(parallel, name), "1")
    if parallel.tensor_parallel_size > MAX_RANKS:
        raise _refused("tensor_parallel_size", parallel.tensor_parallel_size, f"1 to {MAX_RANKS}")
    if parallel.nnodes != 1:
        raise _refused("nnodes", parallel.nnodes, "1: all ranks of an engine on one host")
    ranks_of_one_server = parallel.data_parallel_size > 1 or re.search(r"_dp\d+$", transfer.engine_id or "")
    if ranks_of_one_server and not parallel.data_parallel_external_lb:
        allowed = (
            "1, or a server for each rank (--data-parallel-rank): the router has to know which one it asks"
        )
        raise _refused("data_parallel_size", parallel.data_parallel_size, allowed)
    if vllm_config.speculative_config is not None:
        raise _refused("speculative_config", "one", "none")
    if not vllm_config.model_config.disable_cascade_attn:
        raise _refused(
            "disable_cascade_attn", False, "True: cascade attention counts references that the handoff holds"
        )


def _refused(name: str, found: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}: got {found!r}, allowed is {allowed}")
