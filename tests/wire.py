"""What one engine and its peers say to each other: watched, and lost on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvhandoff.handoff.messages import Body, decode
from tests.cluster import LiveEngine, until

B = TypeVar("B")


def nothing(body: Body) -> bool:
    """Loses no message."""
    return False


class Wire:
    """Stands between an engine's agent and its control plane, and loses what it is told to, in silence."""

    def __init__(self, engine: LiveEngine) -> None:
        self.sent: list[Body] = []
        """What the engine sent, the lost ones included."""
        self.received: list[Body] = []
        """What has reached it; the agent has acted on it."""
        self.lose: Callable[[Body], bool] = nothing
        """Which of its messages get lost."""
        self.refuse: Callable[[Body], bool] = nothing
        """Which messages for it get lost."""
        control = engine.agent._control
        pass_on, take = control.send, control._on_message

        def send(address: str, message: bytes) -> bool:
            body = decode(message).body
            self.sent.append(body)
            return self.lose(body) or pass_on(address, message)

        def receive(raw: bytes) -> None:
            body = decode(raw).body
            if not self.refuse(body):
                take(raw)
                self.received.append(body)

        control.send = send  # type: ignore[method-assign]
        control._on_message = receive

    def sent_of(self, kind: type[B]) -> list[B]:
        """The messages of one kind that the engine sent."""
        return [body for body in self.sent if isinstance(body, kind)]

    def received_of(self, kind: type[B]) -> list[B]:
        """The messages of one kind that have reached it."""
        return [body for body in self.received if isinstance(body, kind)]

    async def has_received(self, kind: type[B], times: int = 1) -> None:
        """Wait until so many messages of one kind have reached it, since the beginning."""
        await until(lambda: len(self.received_of(kind)) >= times)
