"""A system of `stale_references` without engines."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.stale_systems import Reference, Served, System


class Naive(System):
    """Reads whatever a reference names, from blocks that later prompts overwrite: as upstream does."""

    def __init__(self, *, verified: bool = False, name: str = "naive") -> None:
        self.pair = SimpleNamespace(kind=SimpleNamespace(name=name), engines=())  # type: ignore[assignment]
        self.verified = verified
        self.memory: dict[int, str] = {}
        self.made = 0
        self.steps: list[str] = []
        self.begun = False

    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        self.steps.append("prefill" if history is None else "prefill with history")
        self.made += 1
        held = None if history is None else self.memory[history]
        self.memory[self.made] = held if held is not None and not self.verified else prompt
        return self.made, "history: read" if held else "computed"

    async def decode(self, prompt: str, reference: Reference) -> Served:
        self.steps.append("decode")
        held = self.memory[reference]
        return Served(right(prompt if self.verified else held), "checked", kept=reference)

    async def alone(self, prompt: str) -> str:
        return right(prompt)

    async def compute(self, prompt: str) -> None:
        self.steps.append("compute")
        self.memory = dict.fromkeys(self.memory, prompt)

    def begin(self) -> None:
        self.begun = True

    async def death(self) -> str | None:
        assert self.begun, "nobody knows what is of this scene"
        return None


def right(prompt: str) -> str:
    """What the model says."""
    return " " + prompt.split("secret word is ")[1].split(".")[0] if "secret" in prompt else " stone"
