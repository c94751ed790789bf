"""A command that takes vLLM's arguments, and serves as a scripted vLLM engine with a worker process.

`GET /self` says what it was started with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from aiohttp import web

from kvhandoff.handoff.tickets import TicketGate, TicketKey
from tests.router.vllm_engines import MockVllmEngine


class Fake(MockVllmEngine):
    """One engine, at the ports it was told."""

    worker: asyncio.subprocess.Process

    def server(self) -> list[web.RouteDef]:
        return [*super().server(), web.get("/self", self._self)]

    async def _self(self, request: web.Request) -> web.Response:
        facts = {
            "arguments": sys.argv[1:],
            "environment": dict(os.environ),
            "processes": [os.getpid(), self.worker.pid],
        }
        return web.json_response(facts)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    parser.add_argument("--fail", type=int)
    given, _ = parser.parse_known_args()
    if given.fail is not None:
        sys.exit(given.fail)
    transfer = given.kv_transfer_config
    role = transfer["kv_connector_extra_config"]["role"]
    engine = Fake(role, transfer["engine_id"])
    engine.model = given.served_model_name
    engine.port, engine.side_port = given.port, transfer["kv_port"]
    key = TicketKey(os.environ["KVHANDOFF_CLUSTER_KEY"].encode())
    engine.gatekeeper = TicketGate(key, engine.identity)
    engine.worker = await asyncio.create_subprocess_exec("sleep", "600")  # it may outlive its parent
    await engine.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
