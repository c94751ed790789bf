"""Small files that are read again when they change. The last good content stays in force."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvhandoff.core.clock import Sleep
from kvhandoff.core.errors import ConfigError
from kvhandoff.router.wire import Lifespan, Site

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two looks. Contents are compared, not times: an edit within a clock tick, or a secret that is
swapped by its symlink, is seen too, and not every way in which files get into containers keeps times."""

_Value = TypeVar("_Value")


class Watched(Generic[_Value]):
    """What some files say. Used on the event loop's thread; the files are read beside it."""

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        load: Callable[[Sequence[bytes]], _Value],
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`load` gets what is in each of the files, and raises ConfigError when it can't be used; `name`: the
        setting, for messages. Reads the files at once, and raises ConfigError when they can't be used."""
        self._name = name
        self._paths = paths
        self._load = load
        self._sleep = sleep
        self._seen: Sequence[bytes] | None = self._read()
        self.value = load(self._seen)
        """By the last good content."""
        self.problem: str | None = None
        """Why the present content isn't it; None: it is."""

    async def look(self) -> bool:
        """Load the files again if they have changed; bad ones are logged, once, and left aside. Whether there
        is a new value."""
        try:
            now = await asyncio.to_thread(self._read)
        except ConfigError as error:
            self._seen = None  # what stands there again, even the same, is taken again
            self._refuse(error)
            return False
        if now == self._seen:
            return False
        self._seen = now
        try:
            self.value = self._load(now)
        except ConfigError as error:
            self._refuse(error)
            return False
        self.problem = None
        log.info("%s: read again from %s", self._name, ", ".join(map(str, self._paths)))
        return True

    async def changes(self) -> AsyncIterator[_Value]:
        """Look now and then; each new value."""
        while True:
            await self._sleep(LOOK_EVERY_S)
            if await self.look():
                yield self.value

    async def follow(self) -> None:
        """Look now and then, until cancelled."""
        async for _ in self.changes():
            pass

    def _read(self) -> list[bytes]:
        return [read_file(self._name, path) for path in self._paths]

    def _refuse(self, error: ConfigError) -> None:
        if str(error) != self.problem:
            log.error("%s; what was read before stays in force", error)
        self.problem = str(error)


def watching(file: Watched[Any]) -> Lifespan:
    """The file is followed while a site is served."""

    async def lifespan(_: Site) -> AsyncIterator[None]:
        following = asyncio.create_task(file.follow())
        try:
            yield
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    return lifespan


def read_file(name: str, path: Path) -> bytes:
    """Its bytes. Raises ConfigError; `name`: the setting, for its message."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} can't be read ({error.strerror})") from error
