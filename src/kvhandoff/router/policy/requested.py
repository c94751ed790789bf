"""What a request, or the router's settings, ask for by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

from kvhandoff.core.errors import invalid

Path = Literal["local", "pull", "push"]
PathChoice = Literal["auto", "pull", "push", "local"]
PATH_CHOICES: tuple[PathChoice, ...] = get_args(PathChoice)
PATH_HEADER = "x-kvhandoff-path"

ReturnChoice = Literal["auto", "on", "off"]
"""Whether a turn's KV is kept, and fetched for the next turn. `on`: whenever the history can be found;
`auto`: not when it is too short to gain anything, or takes longer to fetch than to compute."""
RETURN_CHOICES: tuple[ReturnChoice, ...] = get_args(ReturnChoice)
RETURN_HEADER = "x-kvhandoff-return"

BindingChoice = Literal["auto", "early", "late", "rebind"]
"""When path `auto` binds the decode engine. `late`: after prefill, so that it pulls; `early`: before, so that
it is pushed to; `rebind`: early, and another one as long as the answer has not begun if that becomes clearly
better; `auto`: what costs less, a push where the decode engine has room."""
BINDING_CHOICES: tuple[BindingChoice, ...] = get_args(BindingChoice)

_Choice = TypeVar("_Choice", bound=str)


def requested_path(header: str | None, default: PathChoice) -> PathChoice:
    """The path that this request asks for in its header `x-kvhandoff-path`. Raises RequestError."""
    return default if header is None else _requested(PATH_HEADER, header, PATH_CHOICES)


def requested_return(header: str | None, default: ReturnChoice) -> ReturnChoice:
    """What this request asks for in its header `x-kvhandoff-return`. Raises RequestError."""
    return default if header is None else _requested(RETURN_HEADER, header, RETURN_CHOICES)


def _requested(name: str, header: str, allowed: Sequence[_Choice]) -> _Choice:
    for choice in allowed:
        if header.strip().lower() == choice:
            return choice
    raise invalid(name, header, ", ".join(allowed))
