"""What does not fit in data that somebody else has written: which field, what stands there, what is allowed.

msgspec says the first two in a message of its own, for programmers; here they are put into a user's words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

_WHERE = re.compile(r"(?P<what>.*?)(?: - at (?:`(?P<key>key)` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}


class Misfit(NamedTuple):
    """The first field that is not as it must be."""

    field: str
    """E.g. `tenants[0].role`; empty: the whole."""
    kind: Literal["wrong", "missing", "unknown"]
    value: object
    """What stands there."""
    allowed: str

    def message(self, whole: str, show: Callable[[object], str]) -> str:
        """For a user. `whole`: what to call it; `show`: a value, or an unknown field's name, as it may be
        shown."""
        where = self.field or whole
        match self.kind:
            case "missing":
                return f"{where}: missing, it is required"
            case "unknown":
                return f"{where}: got the unknown field {show(self.value)}, allowed are {self.allowed}"
            case "wrong":
                return f"{where}: got {show(self.value)}, allowed is {self.allowed}"


def misfit(error: msgspec.ValidationError, whole: object, kind: type[msgspec.Struct]) -> Misfit:
    """Of `whole`, which can't be converted to `kind`, as msgspec says in `error`.

    What is allowed are the description (`msgspec.Meta`) of the field's type, or the values of a `Literal`,
    where there is either."""
    match = _WHERE.fullmatch(str(error))
    assert match is not None
    what, path = match["what"], match["path"] or ""
    steps = _STEP.findall(path)
    here = _type_at(kind, steps)
    if missing := re.search(r"missing required field `(.+)`", what):
        return Misfit(f"{path}.{missing[1]}" if path else missing[1], "missing", None, "")
    if unknown := re.search(r"unknown field `(.+)`", what):
        names = [name for part in _parts(here) if _is_struct(part) for name in part.__struct_fields__]
        return Misfit(path, "unknown", unknown[1], ", ".join(names))
    if match["key"]:
        return Misfit(path, "wrong", _at(whole, steps), "an object whose names are strings")
    return Misfit(path, "wrong", _at(whole, steps), _in_words(here) or _plain(what))


def _at(value: Any, steps: Sequence[tuple[str, str]]) -> Any:
    for name, index in steps:
        value = value[int(index)] if index else value[name]
    return value


def _type_at(kind: Any, steps: Sequence[tuple[str, str]]) -> Any:
    """The annotation of the field; None: it is within something of any type."""
    here = kind
    for name, index in steps:
        inner = None
        for part in _parts(here):
            if index and get_origin(part) in (list, tuple):
                inner = get_args(part)[0]
            elif name and _is_struct(part):
                inner = get_type_hints(part, include_extras=True)[name]
        here = inner
    return here


def _is_struct(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, msgspec.Struct)


def _parts(annotation: Any) -> Iterator[Any]:
    """It, and what it is a union of, or the annotated form of."""
    yield annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for argument in arguments:
            yield from _parts(argument)
    elif origin is Annotated:
        yield from _parts(arguments[0])


def _in_words(annotation: Any) -> str | None:
    for part in _parts(annotation):
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
        if get_origin(part) is Literal:
            return " or ".join(get_args(part))
    return None


def _plain(what: str) -> str:
    """msgspec's ``Expected `int | null`, got `str` `` in words."""
    expected = re.sub(r", got .*", "", what.removeprefix("Expected "), flags=re.DOTALL)

    def words(names: re.Match[str]) -> str:
        return " or ".join(_WORDS.get(name, name) for name in names[1].split(" | "))

    return re.sub(r"`([^`]*)`", words, expected)
