"""Names of engines."""

from __future__ import annotations

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import check_engine_id, engine_id_of


@pytest.mark.parametrize("engine_id", ["decode-0", "10.0.0.1:8000", "A_b.c-9", "x"])
def test_engine_ids(engine_id: str) -> None:
    check_engine_id("engine-id", engine_id)


@pytest.mark.parametrize("engine_id", ["", " ", "a b", "a/b", "a\n", "é", "a%20b", "[x]", "a@b"])
def test_no_engine_ids(engine_id: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine_id("engine-id", engine_id)
    allowed = "letters (a to z), digits, '.', '_', ':' and '-'"
    assert str(refused.value) == f"engine-id: got {engine_id!r}, allowed are {allowed}"


def test_an_id_is_made_of_what_a_host_may_be_called() -> None:
    made = engine_id_of("decode", "my host/é", 8000)
    assert made == "decode-my-host---8000"
    check_engine_id("engine-id", made)
