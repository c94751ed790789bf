"""`kvhandoff up --engine vllm`: two engines of several processes each, their deaths, and their end.

vLLM is played by `fake_vllm.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvhandoff.cli.vllm_machine import engine_environment
from tests.cli.test_bad_input import run
from tests.cli.test_up import Up, alive, children, until

FAKE = f"{sys.executable} -m tests.cli.fake_vllm"
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def up(*arguments: str, **environment: str) -> Any:
    """The command, its output being read; `url` is set when it serves."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhandoff", "up", "--port", "0", "--engine", "vllm"),
        *("--model", "some/model", "--vllm-command", FAKE, *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment},
    )
    running = Up(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def serving(running: Up) -> dict[str, str]:
    """Name → URL of the two engines, when all is up."""
    urls = {}
    for name in ("prefill-0", "decode-0"):
        urls[name] = (await running.said(rf"^{name} +(http://\S+) +shm"))[1]
    running.url = (await running.said(r"^router +(http://\S+)"))[1]
    return urls


async def ask(session: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, Any]]:
    body = {"model": "some/model", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-kvhandoff-path": "pull"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def facts(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What an engine was started with."""
    async with session.get(f"{url}/self") as answer:
        return await answer.json()  # type: ignore[no-any-return]


@pytest.mark.processes
async def test_up_serves_restarts_and_ends() -> None:
    traces = ("--traces", "http://127.0.0.1:9")
    arguments = (*traces, "--", "--enforce-eager", "--max-model-len", "512")
    async with up(*arguments, OMP_NUM_THREADS="7", CUDA_VISIBLE_DEVICES="") as running:
        urls = await serving(running)
        assert set(children(running.process.pid)) == {"prefill-0", "decode-0", "router"}
        async with aiohttp.ClientSession() as session:
            status, answer = await ask(session, running.url)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello")
            known = {name: await facts(session, url) for name, url in urls.items()}
            for name, told in known.items():
                words = told["arguments"]
                assert words[:4] == ["serve", "some/model", "--served-model-name", "some/model"]
                assert words[-9:-6] == ["--enforce-eager", "--max-model-len", "512"]
                assert words[-11:-9] == ["--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces"]
                transfer = json.loads(words[-1])
                assert (transfer["kv_connector"], transfer["kv_role"]) == ("KVHandoffConnector", "kv_both")
                assert transfer["engine_id"] == name
                assert transfer["kv_connector_extra_config"] == {"role": name.partition("-")[0]}
                found = told["environment"]
                assert found["OMP_NUM_THREADS"] == "7"  # the user's
                assert found["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
                assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
                assert found["VLLM_CPU_KVCACHE_SPACE"] == "1"
                assert len(found["KVHANDOFF_CLUSTER_KEY"]) == 64

            # vLLM's main process dies: its worker is ended too, and another life serves at the same address.
            os.kill(known["decode-0"]["processes"][0], signal.SIGKILL)
            await running.said("decode-0 ended")
            await until(lambda: not any(map(alive, known["decode-0"]["processes"])))
            await running.said("decode-0 serves again")
            known["decode-0"] = await facts(session, urls["decode-0"])
            async with asyncio.timeout(60):
                while (await ask(session, running.url))[0] != 200:
                    pass  # the router hasn't seen the new life yet

        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0
        # A worker that was killed may take a moment to go.
        pids = [pid for told in known.values() for pid in told["processes"]]
        await until(lambda: not any(map(alive, pids)))


@pytest.mark.processes
async def test_a_killed_supervisor_leaves_nothing_behind() -> None:
    async with up() as running:
        urls = await serving(running)
        async with aiohttp.ClientSession() as session:
            known = [await facts(session, url) for url in urls.values()]
        pids = [
            *children(running.process.pid).values(),
            *(pid for told in known for pid in told["processes"]),
        ]
        assert all(map(alive, pids))
        running.process.kill()
        await running.process.wait()
        await until(lambda: not any(map(alive, pids)))


@pytest.mark.processes
async def test_an_engine_that_does_not_start() -> None:
    async with up("--", "--fail", "3") as running:
        await running.said("vLLM ended with exit code 3; what it said is above")
        await running.said(r"ended \(exit code 1\) before it served")
        assert await running.process.wait() == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--exact"], "exact: allowed with --engine vllm are vLLM's own arguments, after --"),
        (["--kv-memory", "2"], "kv-memory: allowed with --engine vllm are vLLM's own arguments, after --"),
        (["--on-miss", "error"], "on-miss: got error, allowed with --engine vllm is recompute"),
        (["--", "--port", "1"], "--port: got it for vLLM, allowed is to leave it to kvhandoff"),
        (["--", "--kv_transfer_config={}"], "--kv-transfer-config: got it for vLLM"),
        (["--vllm-command", "no-such-command"], "vllm-command: got 'no-such-command', allowed is a command"),
        (["--vllm-command", "'"], 'vllm-command: got "\'", allowed is a command as in a shell: No closing'),
        (["--vllm-command", ""], "vllm-command: got '', allowed is a command"),
        (
            ["--model", "/no/such/dir"],
            "model: got '/no/such/dir', allowed is a directory or a Hugging Face id",
        ),
        (["--model", "./nowhere"], "model: got './nowhere', allowed is a directory or a Hugging Face id"),
        (["--model", "no/such/dir"], "model: got 'no/such/dir', allowed is a directory or a Hugging Face id"),
        (["--model", "/dev/null"], "model: got '/dev/null', allowed is a directory or a Hugging Face id"),
        (["--model", ""], "model: got '', allowed is a directory or a Hugging Face id"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    done = run("up", "--engine", "vllm", "--model", "some/model", "--port", "0", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "s3://bucket/a/b", str(ROOT)])
def test_models_that_vllm_may_find(model: str) -> None:
    """What stops it is the next thing that is checked."""
    done = run("up", "--engine", "vllm", "--port", "0", "--model", model, "--vllm-command", "no-such-command")
    assert (done.returncode, "vllm-command: got" in done.stderr) == (2, True)


def test_arguments_for_vllm_alone() -> None:
    done = run("up", "--port", "0", "--", "--enforce-eager")
    assert done.returncode == 2
    assert "arguments: got --enforce-eager, allowed without --engine vllm are none" in done.stderr


# ---- what of the machine each engine gets ----


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    return tmp_path


def gpus(dev: Path, count: int) -> None:
    (dev / "nvidiactl").touch()
    for index in range(count):
        (dev / f"nvidia{index}").touch()


@pytest.mark.parametrize(
    ("count", "environment", "wanted"),
    [
        (2, {}, ["0", "1"]),
        (8, {}, ["0,1,2,3", "4,5,6,7"]),
        (3, {}, ["0", "1"]),
        (1, {}, [None, None]),  # they share it
        (8, {"CUDA_VISIBLE_DEVICES": "6,7"}, ["6", "7"]),
        (8, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, ["GPU-a", "GPU-b"]),
    ],
)
def test_gpus_are_dealt_out(dev: Path, count: int, environment: dict[str, str], wanted: list[str]) -> None:
    gpus(dev, count)
    for index in range(2):
        added = engine_environment(environment, index, 2, dev=dev)
        assert added == ({} if wanted[index] is None else {"CUDA_VISIBLE_DEVICES": wanted[index]})


@pytest.mark.parametrize(
    ("count", "environment"),
    [(0, {}), (2, {"CUDA_VISIBLE_DEVICES": ""}), (2, {"CUDA_VISIBLE_DEVICES": "-1"})],
)
def test_without_a_gpu(dev: Path, count: int, environment: dict[str, str]) -> None:
    gpus(dev, count)
    added = engine_environment(environment, 0, 1, dev=dev)
    assert added == {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(os.cpu_count()),
    }
    mine = {"VLLM_CPU_KVCACHE_SPACE": "40", "OMP_NUM_THREADS": "2"}
    added = engine_environment(environment | mine, 0, 1, dev=dev)
    assert added == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.mark.parametrize("name", ["kfd", "dxg"])
def test_another_kind_of_gpu(dev: Path, name: str) -> None:
    (dev / name).touch()
    assert engine_environment({}, 0, 2, dev=dev) == {}
