"""What tenants use of all routers together, on the Valkey or Redis server of the shared index.

    kvhandoff:bucket:NAME     hash      spent, at      the token bucket of `limits.py`, on the server's clock
    kvhandoff:running:NAME    hash      router → requests under way there
    kvhandoff:routers         sorted    router → end of its lease, on the server's clock

One command decides and counts at once, so that two routers never give the same room away. A router states
how many requests it has under way, not by how many they have changed: what is lost, or comes twice, is right
again with its next word. It gives that with each request, and each third of a lease; the share of one that
has died comes back when its lease ends. NAME is a digest under the cluster's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from hashlib import blake2b

from kvhandoff.core.reasons import Reason
from kvhandoff.router.limits import RETRY_CONCURRENCY_S, Excess
from kvhandoff.router.valkey_link import ValkeyLink

LEASE_S = 10.0
"""After which the requests of a router that says nothing any more count as ended."""

_ROUTERS = b"kvhandoff:routers"
_RUNNING = b"kvhandoff:running:"
_BUCKET = b"kvhandoff:bucket:"

_NOW = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
"""

_COUNT = (
    _NOW
    + """
local running, routers, me = KEYS[1], KEYS[2], ARGV[1]
local mine, limit, lease = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call('ZREMRANGEBYSCORE', routers, '-inf', string.format('%.17g', now))
local all = mine
local counts = redis.call('HGETALL', running)
for i = 1, #counts, 2 do
  if counts[i] ~= me then
    if redis.call('ZSCORE', routers, counts[i]) then
      all = all + tonumber(counts[i + 1])
    else
      redis.call('HDEL', running, counts[i])
    end
  end
end
if limit >= 0 and all > limit then return {0, all} end
if mine > 0 then
  redis.call('ZADD', routers, string.format('%.17g', now + lease), me)
  redis.call('PEXPIRE', routers, math.ceil(lease * 1000))
  redis.call('HSET', running, me, mine)
  redis.call('PEXPIRE', running, math.ceil(lease * 1000))
else
  redis.call('HDEL', running, me)
end
return {1, all}
"""
)
"""State a router's requests (`mine`), unless all routers' would be above `limit` (below 0: in any case)."""

_SPEND = (
    _NOW
    + """
local bucket, delta, room, bounded = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local kept = redis.call('HMGET', bucket, 'spent', 'at')
local passed = math.max(0, now - (tonumber(kept[2]) or now))
local spent = math.max(0, (tonumber(kept[1]) or 0) - passed * room / 60)
local over = spent + delta - room
if bounded and over > 0 then return string.format('%.17g', over * 60 / room) end
spent = math.max(0, spent + delta)
redis.call('HSET', bucket, 'spent', string.format('%.17g', spent), 'at', string.format('%.17g', now))
redis.call('PEXPIRE', bucket, math.ceil(spent * 60000 / room) + 1000)
return '0'
"""
)
"""Take `delta` tokens; `bounded`: unless more than a minute's worth (`room`) would be spent. Returns the
seconds after which it wouldn't. A bucket that is full again is none."""


class SharedLimits:
    """Counts on the server at `url`. Used on one event loop.

    `deadline_s`, `connect_s`, `retry_s` and what is raised: see `ValkeyLink`. Whatever can't be asked in time
    is left to the router's own count, and answered with a reason.
    """

    def __init__(
        self,
        url: str,
        key: bytes,
        *,
        deadline_s: float,
        connect_s: float,
        lease_s: float = LEASE_S,
        retry_s: float = 1.0,
    ) -> None:
        self._link = ValkeyLink(
            "limits",
            url,
            deadline_s=deadline_s,
            connect_s=connect_s,
            retry_s=retry_s,
            on_connected=self._state_all,
        )
        self._key = blake2b(key, digest_size=32, person=b"kvhandoff limits").digest()
        self._lease_s = lease_s
        self._me = secrets.token_hex(8)
        self._running: dict[str, int] = {}
        """Tenants with requests here."""
        self._beats: asyncio.Task[None] | None = None

    async def begin(self, tenant: str, running: int, limit: int) -> Excess | Reason | None:
        """One more request, the `running`th here. None: admitted, as far as all routers know. A reason: they
        could not be asked."""
        self._note(tenant, running)
        answer = await self._link.ask(*self._count(tenant, running, limit))
        match answer:
            case [1, int()]:
                return None
            case [0, int(everywhere)]:
                return Excess("max_concurrency", RETRY_CONCURRENCY_S, everywhere - 1)
        return Reason.LIMITS_NOT_SHARED

    def state(self, tenant: str, running: int) -> None:
        """So many requests are under way here now. Returns at once."""
        if not running and tenant not in self._running:
            return
        self._note(tenant, running)
        self._link.tell(*self._count(tenant, running, -1))

    async def reserve(self, tenant: str, tokens: int, room: int) -> Excess | Reason | None:
        """Set tokens aside, of a minute's worth. None: admitted. A reason: it could not be asked."""
        answer = await self._link.ask(*self._spend(tenant, tokens, room, bounded=True))
        if isinstance(answer, bytes):
            with contextlib.suppress(ValueError):
                retry_after_s = float(answer)
                return Excess("tokens_per_minute", retry_after_s) if retry_after_s > 0 else None
        return Reason.LIMITS_NOT_SHARED

    def settle(self, tenant: str, delta: int, room: int) -> None:
        """Tokens that were used beyond those set aside, or fewer. Returns at once."""
        self._link.tell(*self._spend(tenant, delta, room, bounded=False))

    async def start(self) -> None:
        """Returns when the first attempt to connect has ended."""
        await self._link.start()
        self._beats = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """What is still under way counts until the lease's end."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        await self._link.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            self._state_all()

    def _state_all(self) -> None:
        for tenant, running in self._running.items():
            self._link.tell(*self._count(tenant, running, -1))

    def _note(self, tenant: str, running: int) -> None:
        if running:
            self._running[tenant] = running
        else:
            self._running.pop(tenant, None)

    def _count(self, tenant: str, running: int, limit: int) -> tuple[object, ...]:
        keys = (2, self._name(_RUNNING, tenant), _ROUTERS)
        return ("EVAL", _COUNT, *keys, self._me, running, limit, self._lease_s)

    def _spend(self, tenant: str, delta: int, room: int, *, bounded: bool) -> tuple[object, ...]:
        return ("EVAL", _SPEND, 1, self._name(_BUCKET, tenant), delta, room, int(bounded))

    def _name(self, prefix: bytes, tenant: str) -> bytes:
        return prefix + blake2b(tenant.encode(), digest_size=16, key=self._key).digest()
