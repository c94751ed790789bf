"""vLLM's own NIXL connectors, tuned for a machine with few cores. Loaded by vLLM, not by a benchmark.

As shipped they bind each worker's main thread to the last core, and NIXL's progress thread spins: with two
engines on two cores all four of those compete. Here the threads stay where the kernel puts them, and the
progress thread sleeps between two looks. Nothing else differs: the classes are upstream's.

`--kv-transfer-config` finds them by `"kv_connector_module_path": "benchmarks.tuned_upstream"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPushConnector

PROGRESS_DELAY_US = 1000
"""Of NIXL's progress thread, the same as of kvhandoff's own agents."""


@contextmanager
def _tuned() -> Iterator[None]:
    """What is made in this context is tuned: the connector's worker half binds its thread, and starts its
    agent, in its constructor."""
    import nixl._bindings as bindings

    make_agent = bindings.nixlAgent

    def patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make_agent(name, config)

    with (
        patch.object(os, "sched_setaffinity", lambda *_: None),
        patch.object(bindings, "nixlAgent", patient_agent),
    ):
        yield


class TunedNixlConnector(NixlPullConnector):
    """`NixlConnector`, tuned."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with _tuned():
            super().__init__(*arguments, **options)


class TunedNixlPushConnector(NixlPushConnector):
    """`NixlPushConnector`, tuned."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with _tuned():
            super().__init__(*arguments, **options)
