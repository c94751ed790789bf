"""A prefill and a decode engine of vLLM, with this connector or with upstream's, and the router in front.

Upstream's connectors run as shipped, or tuned (see `tuned_upstream`): on a machine with few cores the former
loses seconds to threads that compete, which says nothing of its protocol.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.vllm_engines import EngineSpec, Running, VllmSettings, engines
from kvhandoff.cli.children import Child
from kvhandoff.cli.common import CLUSTER_KEY_ENV
from kvhandoff.web import free_port

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
HOST = "127.0.0.1"
TUNED_MODULE = "benchmarks.tuned_upstream"


@dataclass(frozen=True, kw_only=True)
class PairKind:
    """What is started."""

    name: str
    connector: Literal["kvhandoff", "nixl", "nixl-push"]
    tuned: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config` of both engines."""
    prefill_arguments: tuple[str, ...] = ()
    """Further ones of the prefill engine."""

    def spec(self, role: Role, cluster_key: str) -> EngineSpec:
        """One engine."""
        port = free_port()
        if self.connector == "kvhandoff":
            transfer: dict[str, Any] = {
                "kv_connector": "KVHandoffConnector",
                "kv_port": port,
                "kv_connector_extra_config": {"role": role, **self.extra},
            }
            environment = {CLUSTER_KEY_ENV: cluster_key}
        else:
            named = "NixlConnector" if self.connector == "nixl" else "NixlPushConnector"
            transfer = {"kv_connector": f"Tuned{named}" if self.tuned else named}
            transfer |= {"engine_id": role, "kv_connector_extra_config": self.extra}
            if self.tuned:
                transfer["kv_connector_module_path"] = TUNED_MODULE
            environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        return EngineSpec(
            name=f"{self.name}-{role}",
            transfer={"kv_role": "kv_both", **transfer},
            environment=environment,
            side_port=port,
            arguments=self.prefill_arguments if role == "prefill" else (),
        )

    def router(self, prefill: Running, decode: Running) -> list[str]:
        """The router's command line."""
        if self.connector == "kvhandoff":
            sides = [f",internal=http://{HOST}:{engine.spec.side_port}" for engine in (prefill, decode)]
        else:
            sides = [f",engine_id=prefill,side_channel={HOST}:{prefill.spec.side_port}", ""]
        addresses = ("--prefill", prefill.url + sides[0], "--decode", decode.url + sides[1])
        return [
            "router",
            "--log-level",
            "warning",
            "--connector",
            self.connector,
            "--pair-tests",
            "off",
            *addresses,
        ]


KVHANDOFF = "kvhandoff"


@dataclass(frozen=True)
class Pair:
    """Two engines that are healthy."""

    kind: PairKind
    prefill: Running
    decode: Running
    cluster_key: str = field(repr=False)

    @property
    def engines(self) -> tuple[Running, Running]:
        return self.prefill, self.decode


@asynccontextmanager
async def pair(settings: VllmSettings, kind: PairKind) -> AsyncIterator[Pair]:
    """Start a pair, and end it. Raises EngineFailed."""
    cluster_key = secrets.token_hex(32)
    specs = [kind.spec(role, cluster_key) for role in ROLES]
    async with engines(settings, specs) as (prefill, decode):
        yield Pair(kind, prefill, decode, cluster_key)


@asynccontextmanager
async def router(between: Pair) -> AsyncIterator[str]:
    """A router in front of a pair; its URL. Raises ChildFailed or ConfigError."""
    environment = {**os.environ, CLUSTER_KEY_ENV: between.cluster_key}
    child = Child("router", between.kind.router(*between.engines), environment)
    try:
        yield (await child.start())["url"]
    finally:
        await child.stop()
