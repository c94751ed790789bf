"""How every process of the project logs: one line for each event, on standard error, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum

import msgspec
import typer

from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason


class Level(StrEnum):
    """The least serious events that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Format(StrEnum):
    """What a line of the log is."""

    TEXT = "text"
    JSON = "json"


LogLevel = typer.Option(Level.INFO, "--log-level", help="The least serious events that are logged.")
LogFormat = typer.Option(
    Format.TEXT, "--log-format", help="Lines for readers, or JSON objects for programs, with more fields."
)

_ALWAYS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every record of the log; any other one came with `extra`."""


def set_up_logging(level: Level, format: Format, name: str) -> None:  # noqa: A002  the option's name
    """Log to standard error. `name`: the process's."""
    handler = logging.StreamHandler(sys.stderr)
    if format is Format.JSON:
        handler.setFormatter(JsonFormatter(name))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One JSON object for each event: time (UTC), level, process, logger, message, and fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`. A field never replaces one of the first five."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = dict(_fields(record)) | line
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str, order=None).decode()


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """What an event is about: read off the arguments of its message, and what came with `extra`."""
    for argument in record.args if isinstance(record.args, tuple) else ():
        match argument:
            case HandoffKey():
                yield "handoff_id", argument.handoff_id
                yield "attempt", argument.attempt
            case Identity() | object(identity=Identity()):
                life = argument if isinstance(argument, Identity) else argument.identity
                yield "engine", life.engine_id
                yield "epoch", life.epoch
            case Reason():
                yield "reason", argument.value
    for name, value in vars(record).items():
        if name not in _ALWAYS:
            yield name, value
