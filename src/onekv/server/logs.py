"""Configures the server's log: to stderr, one line per record, including warnings of libraries.

    text   time, level, logger and message, for people
    json   the same as one object per line, for collectors (`--log-format json`)

A record that consists of figures, as the line of a request does, is logged by `log_fields`: each `Field` defines both
its text and the members of the JSON object, so the two formats share one definition.
"""

import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

LOG_FORMATS = ("text", "json")
# What uvicorn warns of and any client can cause at any rate; the answer says it.
_NOISE = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket library detected")


class Field:
    """One part of a line: as text, and as members of an object. Members that are None are not known, and are null."""

    def __init__(self, text: str, **members: Any) -> None:
        self.text, self.members = text, members


def log_fields(log: logging.Logger, level: int, fields: Sequence[Field]) -> None:
    text = " ".join(field.text for field in fields)
    log.log(level, "%s", text, extra={"fields": fields})


def log_to_stderr(level: str, form: str = "text") -> None:
    """From `level` on what is ours; of libraries no more than what they warn of. `form` is one of LOG_FORMATS."""
    ours = logging.getLogger("onekv")
    ours.setLevel(level.upper())
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(_Objects())
        # They would be lines of text among objects.
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=max(ours.level, logging.WARNING), handlers=[handler])


class _Objects(logging.Formatter):
    """A record as one line of JSON; text of several lines, such as a traceback, is one string in it."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        fields: Sequence[Field] | None = getattr(record, "fields", None)
        if fields is None:
            said["message"] = record.getMessage()
        else:
            said |= {name: value for field in fields for name, value in field.members.items()}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = self.formatStack(record.stack_info)
        # ASCII alone: no reader splits a line at U+2028, and half of a surrogate pair can be written.
        return json.dumps(said, default=str)


def quiet_uvicorn() -> None:
    """Uvicorn logs what it does to a logger named uvicorn.error, which looks like an error and is none."""
    logging.getLogger("uvicorn.error").addFilter(_worth_telling)


def _worth_telling(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING and not str(record.msg).startswith(_NOISE)
