"""Small files that are read again when they change. The last good content stays in force."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvhandoff.core.errors import ConfigError
from kvhandoff.router.wire import Lifespan, Site

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two looks. Contents are compared, not times: an edit within a clock tick, or a secret that is
swapped by its symlink, is seen too."""

_Value = TypeVar("_Value")


class Watched(Generic[_Value]):
    """What some files say. `load` reads them, and raises ConfigError when they can't be used."""

    def __init__(self, name: str, paths: Sequence[Path], load: Callable[[], _Value]) -> None:
        """Raises ConfigError when the first content can't be used; `name`: the setting, for messages."""
        self._name = name
        self._paths = paths
        self._load = load
        self._seen = _digest(paths)  # before loading: the next look sees what changes in between
        self.value = load()
        """By the last good content."""

    def look(self) -> None:
        """Load the files again if they have changed; bad ones are logged and left aside."""
        now = _digest(self._paths)
        if now == self._seen:
            return
        self._seen = now
        try:
            self.value = self._load()
        except ConfigError as error:
            log.error("%s; what was read before stays in force", error)
        else:
            log.info("%s: read again from %s", self._name, ", ".join(map(str, self._paths)))

    async def follow(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()


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


def _digest(paths: Sequence[Path]) -> bytes:
    """Of what is in them now; one that can't be read has no content."""
    digest = blake2b()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError:
            digest.update(b"-")
        else:
            digest.update(b"+%d:" % len(content) + content)
    return digest.digest()
