"""A command whose messages about bad options say what was given, too."""

from __future__ import annotations

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """typer names the option and what is allowed; of numbers, it leaves out the value."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """See `click.Command`."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            given = _given(error)
            if given is not None and given not in error.message:
                error.message = f"got {given}: {error.message}"
            raise


def _given(error: typer.BadParameter) -> str | None:
    """The value that was refused; None: typer doesn't tell. It checks values with pydantic, whose error is
    the cause of its own."""
    errors = getattr(error.__cause__, "errors", None)
    return repr(errors()[0]["input"]) if errors is not None else None
