"""A fleet of equal engines as the policies see it, without engines."""

from __future__ import annotations

from kvhandoff.router.policy import EngineView


class EqualEngines:
    """`n` engines, named by their index, with what has been given to each of them."""

    def __init__(self, n: int) -> None:
        self.load = [0] * n
        self.chosen = [0] * n

    def views(self) -> list[EngineView]:
        """As they are now."""
        return [
            EngineView(
                url=str(i),
                model="m",
                healthy=True,
                block_size=16,
                load=load,
                chosen=chosen,
                waiting=0,
                room=10**6,
            )
            for i, (load, chosen) in enumerate(zip(self.load, self.chosen, strict=True))
        ]

    def give(self, engine: EngineView, tokens: int) -> int:
        """A request of so many tokens; the engine's index."""
        i = int(engine.url)
        self.load[i] += tokens
        self.chosen[i] += 1
        return i
