"""Whether there is another attempt, and of which kind."""

from __future__ import annotations

import pytest

from kvhandoff.router.retry import Retry, next_attempt


@pytest.mark.parametrize(
    ("failed", "too_old", "of_prefill", "expected"),
    [
        (1, False, False, "again"),
        (1, False, True, "again"),
        (2, False, False, "again"),
        (2, False, True, "local"),  # the last one
        (3, False, False, None),
        (3, False, True, None),
        (1, True, False, None),
        (1, True, True, "local"),
        (3, True, True, None),
    ],
)
def test_of_three_attempts(failed: int, too_old: bool, of_prefill: bool, expected: Retry | None) -> None:
    assert next_attempt(failed=failed, allowed=3, too_old=too_old, of_prefill=of_prefill) == expected
