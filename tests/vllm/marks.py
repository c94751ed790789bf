"""Which pairs of engines a test runs with."""

from __future__ import annotations

import pytest

gqa = pytest.mark.parametrize("engines", ["gqa"], indirect=True)
"""One model is enough: what is shown has nothing to do with the shape of the KV."""
both = pytest.mark.parametrize("engines", ["gqa", "mla"], indirect=True)
