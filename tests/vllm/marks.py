"""Which pairs of engines a test runs with."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("KVHANDOFF_VLLM") == "full"
"""By hand: as many requests and deaths as it takes to be sure."""

gqa = pytest.mark.parametrize("engines", ["gqa"], indirect=True)
"""One model is enough: what is shown has nothing to do with the shape of the KV."""
every = pytest.mark.parametrize("engines", ["gqa", "mla", *(["smollm2"] if FULL else [])], indirect=True)
both = pytest.mark.parametrize("engines", ["gqa", "mla"], indirect=True)
