"""What workers have been told while they ran, so that one that is started again knows it too."""

from __future__ import annotations

import logging

import msgspec

from kvhandoff.router.fleet import Fleet
from kvhandoff.router.registrations import Registrations
from kvhandoff.router.worker import Siblings

log = logging.getLogger(__name__)

WORKER_PAGE = "/internal/worker"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Orders and registrations that hold."""

    drained: list[str] = []
    """URLs of engines that an operator drains."""
    registrations: list[str] = []
    """As the engines signed them."""

    def drain(self, fleet: Fleet) -> None:
        """Carry the orders out."""
        for engine in fleet.engines:
            if engine.url in self.drained:
                engine.ordered_drain = True


_told = msgspec.json.Decoder(Told)


def told_by(fleet: Fleet, registrations: Registrations | None) -> Told:
    """What this worker has been told."""
    return Told(
        drained=[engine.url for engine in fleet.engines if engine.ordered_drain],
        registrations=[str(signed) for signed in registrations.last()] if registrations is not None else [],
    )


async def read_told(siblings: Siblings) -> Told:
    """What a sibling has been told; nothing, where there is none yet."""
    page = await siblings.first(WORKER_PAGE)
    if page is None:
        return Told()
    try:
        return _told.decode(page)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("a sibling's %s can't be read: %s", WORKER_PAGE, error)
        return Told()
