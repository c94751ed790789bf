"""What does not fit, in a user's words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from kvhandoff.core.errors import excerpt
from kvhandoff.core.fields import misfit


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    color: Literal["red", "blue"] = "red"
    sizes: list[Annotated[int, msgspec.Meta(ge=1, description="a whole number, 1 or more")]] = []


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    ratio: Annotated[float, msgspec.Meta(le=1)] = 1.0
    free: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        ([1], "", "it: got [1], allowed is an object"),
        ({}, "name", "name: missing, it is required"),
        ({"name": 5}, "name", "name: got 5, allowed is a string"),
        ({"name": "n", "inner": True}, "inner", "inner: got true, allowed is an object or null"),
        (
            {"name": "n", "inner": {"color": "x"}},
            "inner.color",
            "inner.color: got 'x', allowed is red or blue",
        ),
        (
            {"name": "n", "many": [{}, {"sizes": [3, 0]}]},
            "many[1].sizes[1]",
            "many[1].sizes[1]: got 0, allowed is a whole number, 1 or more",
        ),
        (
            {"name": "n", "many": [{"colour": 1}]},
            "many[0]",
            "many[0]: got the unknown field 'colour', allowed are color, sizes",
        ),
        ({"name": "n", "ratio": 2}, "ratio", "ratio: got 2, allowed is a number <= 1.0"),
        (
            {"name": "n", "free": {1: 2}},
            "free",
            "free: got {1: 2}, allowed is an object whose names are strings",
        ),
        (
            {"name": "n", 1: 2},
            "",
            "it: got {'name': 'n', 1: 2}, allowed is an object whose names are strings",
        ),
    ],
)
def test_messages(value: Any, field: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(value, Outer)
    wrong = misfit(refused.value, value, Outer)
    assert wrong.field == field
    assert wrong.message("it", excerpt) == message


def test_an_excerpt_is_short_and_in_the_words_of_json() -> None:
    assert excerpt([None, True, False, 1.5, "x"]) == "[null, true, false, 1.5, ...]"
    large = {f"name {i} {'x' * 99}": [["y" * 999] * 99] for i in range(99)}
    assert len(excerpt(large)) == 200
