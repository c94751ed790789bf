"""A command whose messages about bad options say what was given, too."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """typer names the option and what is allowed; of numbers, it leaves out the value, and one end of the
    range."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """See `click.Command`."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            fault = _fault(error)
            if fault is not None:
                given, allowed = repr(fault["input"]), _range(error.param)
                if fault["type"] in _OUT_OF_RANGE and allowed is not None:
                    error.message = f"got {given}, allowed is {allowed}"
                elif given not in error.message:
                    error.message = f"got {given}: {error.message}"
            raise


_OUT_OF_RANGE = ("greater_than_equal", "less_than_equal")
"""pydantic's names for it, which it says of nan, too: https://docs.pydantic.dev/latest/errors/validation_errors/"""


def _fault(error: typer.BadParameter) -> dict[str, Any] | None:
    """What pydantic, with which typer checks values, has found; None: another has refused it."""
    errors = getattr(error.__cause__, "errors", None)
    return errors()[0] if errors is not None else None


def _range(param: Any) -> str | None:
    """The numbers that an option takes; None: any."""
    least, most = getattr(param, "min", None), getattr(param, "max", None)
    if least is None:
        return None if most is None else f"up to {most}"
    return f"{least} or more" if most is None else f"{least} to {most}"
