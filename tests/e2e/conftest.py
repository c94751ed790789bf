from __future__ import annotations

from pathlib import Path

import pytest

from tests.tinymodels import cached_tiny_model


@pytest.fixture(scope="session")
def tiny() -> Path:
    """A tiny random Llama with a tokenizer."""
    return cached_tiny_model("llama")
