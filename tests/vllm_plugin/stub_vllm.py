"""As much of vLLM's package as `connector.py` and `plugin.py` import, for a Python without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import pytest


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase_V1:  # noqa: N801  vLLM's name
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata


class Metadata:
    """Base of what halves and workers exchange."""


class TransferResults:
    def __init__(self, *, finished_recving: set[str], failed_recving: set[str]) -> None:
        self.finished_recving = finished_recving
        self.failed_recving = failed_recving


class Factory:
    """vLLM's registry of connectors: a second registration of a name is an error."""

    registered: dict[str, tuple[str, str]] = {}  # noqa: RUF012  as vLLM has it

    @classmethod
    def register_connector(cls, name: str, module: str, class_name: str) -> None:
        if name in cls.registered:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.registered[name] = (module, class_name)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Make these modules importable, and `kvhandoff.vllm.connector` be imported anew."""
    package = "vllm.distributed.kv_transfer.kv_connector"
    base, factory = f"{package}.v1.base", f"{package}.factory"
    names = {
        base: {
            "KVConnectorBase_V1": KVConnectorBase_V1,
            "KVConnectorHandshakeMetadata": Metadata,
            "KVConnectorMetadata": Metadata,
            "KVConnectorRole": KVConnectorRole,
            "KVConnectorTransferResults": TransferResults,
            "KVConnectorWorkerMetadata": Metadata,
        },
        factory: {"KVConnectorFactory": Factory},
        "vllm": {"__version__": version},
    }
    Factory.registered.clear()
    for module in sorted({*names, *(parent for name in names for parent in _parents(name))}):
        made = ModuleType(module)
        made.__path__ = []
        for name, value in names.get(module, {}).items():
            setattr(made, name, value)
        monkeypatch.setitem(sys.modules, module, made)
        parent, _, name = module.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, made)
    monkeypatch.delitem(sys.modules, "kvhandoff.vllm.connector", raising=False)
    monkeypatch.delitem(sys.modules, "kvhandoff.vllm.plugin", raising=False)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
