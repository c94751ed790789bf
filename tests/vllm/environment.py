"""Where vLLM is: an environment of its own, as its pins of transformers and kvhandoff's don't agree.

`make vllm-env` makes it at `.venv-vllm`; `$KVHANDOFF_VLLM_PYTHON` names the Python of another one that has
vLLM and kvhandoff's `vllm` extra.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PYTHON_ENV = "KVHANDOFF_VLLM_PYTHON"
ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-vllm"
IMPOSSIBLE = HOME / ".impossible"
"""Written by `make vllm-env` instead of `.ready` where vLLM can't be installed: one line that says why."""


@dataclass(frozen=True)
class Environment:
    """A Python that has vLLM, or why there is none."""

    python: Path | None
    why_not: str = ""

    @property
    def vllm(self) -> Path:
        """vLLM's command. Raises LookupError where there is none."""
        if self.python is None:
            raise LookupError(self.why_not)
        return self.python.with_name("vllm")


def find() -> Environment:
    """The environment to test with. Raises FileNotFoundError for one that was named and isn't there."""
    named = os.environ.get(PYTHON_ENV)
    if named:
        python = Path(named)
        if not python.with_name("vllm").is_file():
            raise FileNotFoundError(f"{PYTHON_ENV}: there is no vllm command beside {named!r}")
        return Environment(python)
    if (HOME / ".ready").is_file():
        return Environment(HOME / "bin" / "python")
    if IMPOSSIBLE.is_file():
        return Environment(None, IMPOSSIBLE.read_text().strip())
    return Environment(None, f"no environment at {HOME.name}; `make vllm-env` makes it")
