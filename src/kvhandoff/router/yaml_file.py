"""A YAML file of settings, read into a struct: what is wrong in it is named by its field.

The files hold secrets, perhaps misplaced: a salt where a number belongs, or a password in a URL. So a value
is shown only if it is shorter than any of them, and of no field that is for secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime
from typing import Any, TypeVar

import msgspec
import yaml

from kvhandoff.core.errors import ConfigError, excerpt
from kvhandoff.core.fields import misfit

SECRET_CHARACTERS = 16
"""No salt, key or hash has fewer."""

_TYPED = re.compile(r"[A-Za-z_-]{1,31}")
"""The name of a field; keys and salts, longer or with digits, are none."""

_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_DATES = (datetime, date)
"""Which YAML knows, and JSON doesn't."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The faster one where PyYAML has it."""


def read_yaml(raw: bytes, kind: type[_Kind], *, secret: tuple[str, ...] = ()) -> _Kind:
    """What is in a file. Raises ConfigError naming the field, what stands there and what is allowed; values
    in the fields `secret` are never shown, however short."""
    try:
        whole = _load(raw)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # The parser's own message may show the line, and what is in it.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"it is neither YAML nor JSON{where}") from error
    try:
        return msgspec.convert(whole, kind, builtin_types=_DATES)
    except msgspec.ValidationError as error:
        wrong = misfit(error, whole, kind)
        hidden = any(name in secret for name in re.split(r"[.[]", wrong.field))
        show = _kind_of if hidden else _field_name if wrong.kind == "unknown" else _value
        raise ConfigError(wrong.message("the file", show)) from error


def _load(raw: bytes) -> Any:
    """What is written there. Raises ConfigError for a field that is there twice, of which PyYAML would take
    the last one, and what PyYAML raises for text that is no YAML."""
    loader = _Loader(raw)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        for field, lines in _repeated(root, "", set()):
            raise ConfigError(f"{field}: got it at lines {lines[0]} and {lines[1]}, allowed is once")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _repeated(node: Any, path: str, seen: set[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """(field, its first two lines) of the fields that an object below `node` has more than once. `seen`:
    the nodes that have been looked at, since an alias is the node that it stands for."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated(item, f"{path}[{index}]", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # no field's name: refused later
            name = key.value if _TYPED.fullmatch(key.value) else f"a name of {len(key.value)} characters"
            field = f"{path}.{name}" if path else name
            line = key.start_mark.line + 1
            same = key.tag, key.value
            if same in lines:
                yield field, (lines[same], line)
            lines[same] = line
            yield from _repeated(value, field, seen)


def _kind_of(value: object) -> str:
    """What it is, and nothing of what is in it."""
    match value:
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"an array of {len(value)}"
        case dict():
            return "an object"
        case None:
            return "null"
        case _:
            return f"a value of type {type(value).__name__}"


def _value(value: object) -> str:
    simple = value is None or isinstance(value, str | int | float)
    short = simple and len(str(value)) < SECRET_CHARACTERS and "@" not in str(value)
    return excerpt(value) if short else _kind_of(value)


def _field_name(value: object) -> str:
    """A mistyped one; whatever else stands in its place may be anything."""
    return repr(value) if _TYPED.fullmatch(str(value)) else _kind_of(value)
