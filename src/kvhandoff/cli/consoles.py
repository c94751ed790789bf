"""What a person is told on the terminal. Nothing in it is markup: values stand there as they were given."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that styles only what is given a style. Rich's own markup would eat `[valkey]` and the host
    of `http://[::1]:8000`, raise an exception for `[/x]`, and take `:x:` for an emoji."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True)


def wrong(label: str, message: object) -> Text:
    """What is wrong, behind a label that is seen."""
    return Text.assemble((f"{label}:", "bold red"), f" {message}")
