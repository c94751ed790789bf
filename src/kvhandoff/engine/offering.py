"""One prefill leg's KV going out: an offer, made at the end of the prompt or growing with it."""

from __future__ import annotations

from collections.abc import Sequence

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import to_spans
from kvhandoff.engine.api import KVRequest, PrefillStats
from kvhandoff.engine.leg_host import LegHost
from kvhandoff.handoff.events import (
    OfferAbandoned,
    Offered,
    OfferGrown,
    OfferStarted,
    PeerWanted,
    Withdrawn,
)
from kvhandoff.handoff.messages import OfferDescriptor


class Offering:
    """From the request being submitted to the offer being the protocol's, or never made."""

    def __init__(self, host: LegHost, key: HandoffKey, *, grows: bool, peers: Sequence[str]) -> None:
        """`grows`: a push. `peers`: control addresses to connect to ahead of the grants."""
        self.descriptor: OfferDescriptor | None = None
        """None until the prompt is computed."""
        self._host = host
        self._key = key
        self._grows = grows
        self._peers = peers
        self._blocks: list[int] = []
        self._chain: TokenChain | None = None

    @property
    def n_blocks(self) -> int:
        """Blocks handed to the protocol so far."""
        return len(self._blocks)

    def prepare(self, request: KVRequest) -> None:
        """Have the engine hand over the KV."""
        request.offer, request.grow = True, self._grows

    def begin(self, chain: TokenChain) -> None:
        """The request has been submitted."""
        self._chain = chain
        for address in self._peers:
            self._host.feed(PeerWanted(address))
        if self._grows:
            self._host.feed(OfferStarted(self._key, chain))

    def on_grown(self, blocks: Sequence[int]) -> None:
        """The next full blocks are computed."""
        self._blocks += blocks
        self._host.feed(OfferGrown(self._key, tuple(blocks)))

    def on_offered(
        self, blocks: Sequence[int], first_token: int, stats: PrefillStats, *, nobody_comes: bool
    ) -> None:
        """The prompt is computed: offer it."""
        chain = self._chain
        assert chain is not None, "begin comes before"
        self._blocks += blocks
        cached = stats.cached_tokens + stats.transferred_tokens
        self.descriptor = descriptor_of(self._host, self._key, chain, self._blocks, first_token, cached)
        self._host.feed(Offered(self._key, chain, tuple(blocks), first_token, cached))
        if nobody_comes:
            self._host.feed(Withdrawn(self._key))

    def on_abandoned(self) -> None:
        """The engine will not complete it."""
        self._host.feed(OfferAbandoned(self._key, Reason.OFFER_ABANDONED))


def descriptor_of(
    host: LegHost,
    key: HandoffKey,
    chain: TokenChain,
    blocks: Sequence[int],
    first_token: int,
    cached_tokens: int,
) -> OfferDescriptor:
    """What a prefill leg's answer says of its offer. `blocks` are all of the prompt's. Any thread."""
    return OfferDescriptor(
        key=key,
        source=host.me,
        control_address=host.control_address,
        spans=to_spans(blocks),
        n_tokens=chain.n_tokens,
        digest=chain.digest(),
        cached_tokens=cached_tokens,
        first_token=first_token,
    )
