"""What `kvhandoff doctor` finds out: what is in use at an engine, what is wrong there, or between several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvhandoff.core.errors import ConfigError, describe
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity, new_handoff_id
from kvhandoff.core.records import EngineState
from kvhandoff.handoff.messages import PROTOCOL_VERSION
from kvhandoff.handoff.tickets import Ticket, TicketKey
from kvhandoff.router.address import EngineAddress
from kvhandoff.router.side import AnothersPages, NoReport, SidePages
from kvhandoff.router.stranger import ROUTER, who_answers

TIMEOUT_S = 5.0
"""For each question; an engine that takes longer serves nobody well."""
TICKET_S = 20.0

_MUST_AGREE = ("model", "model fingerprint", "data plane", "protocol_version", "integration")
"""Facts of which engines that hand over must have the same, beside all of their layouts."""


@dataclass(slots=True)
class Finding:
    """One engine's."""

    address: EngineAddress
    facts: dict[str, str] = field(default_factory=dict)
    """What is in use there, by name; empty when nothing could be learned."""
    problems: list[str] = field(default_factory=list)


async def examine(address: EngineAddress, key: bytes | None) -> Finding:
    """Ask one engine. `key`: the cluster's; without one it is not known whether the engine has the same."""
    finding = Finding(address)
    async with aiohttp.ClientSession(trust_env=False) as session:
        pages = SidePages(address, session)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                state = await pages.state(0)
            finding.facts = {"pages": pages.url, **_facts(state)}
            async with asyncio.timeout(TIMEOUT_S):
                finding.facts |= await pages.about()
            finding.problems += _versions(finding.facts)
            if key is not None:
                async with asyncio.timeout(TIMEOUT_S):
                    status, error = await pages.post("peers", _ticket(state, key))
                if status >= 300:
                    finding.problems.append(f"it refuses the cluster key: {error.message or status}")
        except TimeoutError:
            finding.problems.append(f"no answer in {TIMEOUT_S:g} s")
        except msgspec.DecodeError as error:
            finding.problems.append(f"its answer can't be read, its version may be another: {error}")
        except AnothersPages as error:
            finding.problems.append(describe(error))
        except NoReport as error:
            finding.problems.append(await _instead(address.url, session, error))
        except (aiohttp.ClientError, OSError) as error:
            finding.problems.append(describe(error))
    return finding


async def _instead(url: str, session: aiohttp.ClientSession, error: NoReport) -> str:
    """What is wrong with a server that answers, but not as an engine."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            found = await who_answers(url, session)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return describe(error)
    if found == ROUTER:
        return f"{found} answers here, allowed is an engine: name those that it was given"
    return f"{found} answers here, which is no engine of kvhandoff as far as it says: {describe(error)}"


def disagreements(findings: Sequence[Finding]) -> Iterator[str]:
    """What would make engines refuse each other at their handshake; each is compared with the first one."""
    known = [finding for finding in findings if finding.facts]
    for other in known[1:]:
        first = known[0]
        names = [name for name in first.facts if name in _MUST_AGREE or name.startswith("layout.")]
        for name in names:
            here, there = first.facts[name], other.facts.get(name, "nothing")
            if here != there:
                yield f"{name}: {here} at {first.address.url}, {there} at {other.address.url}"


def same_engines(findings: Sequence[Finding]) -> Iterator[str]:
    """Engines that were named by several addresses; a router would take each for another one."""
    found: dict[tuple[str, str], str] = {}
    for finding in findings:
        if finding.facts:
            life = finding.facts["engine"], finding.facts["epoch"]
            first = found.setdefault(life, finding.address.url)
            if first != finding.address.url:
                yield f"{first} and {finding.address.url} are one engine, {life[0]}"


def _facts(state: EngineState) -> dict[str, str]:
    blocks = state.blocks
    return {
        "engine": state.engine_id,
        "epoch": state.epoch,
        "role": state.role,
        "integration": state.integration,
        "model": state.model,
        "model fingerprint": state.model_fingerprint,
        "longest request": f"{state.max_model_len} tokens",
        "control address": state.control_address,
        "data plane": state.data_plane,
        "requests": f"{state.running} running, {state.waiting} waiting, {state.loading} loading",
        "blocks": ", ".join(f"{getattr(blocks, name)} {name}" for name in blocks.__struct_fields__),
    }


def _versions(facts: dict[str, str]) -> list[str]:
    problems = []
    version = facts.get("protocol_version", "none")
    if version != str(PROTOCOL_VERSION):
        problems.append(f"protocol_version: got {version}, allowed is {PROTOCOL_VERSION}")
    if facts.get("integration") == "vllm":
        from kvhandoff.vllm.settings import check_version

        try:
            check_version(facts.get("vllm", "none"))
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _ticket(state: EngineState, key: bytes) -> str:
    """A ticket that asks for nothing: an introduction to nobody."""
    return TicketKey(key).sign(
        Ticket(
            leg="peers",
            audience=Identity(EngineId(state.engine_id), Epoch(state.epoch)),
            not_after=state.now + TICKET_S,
            key=HandoffKey(new_handoff_id(), 0),
        )
    )
