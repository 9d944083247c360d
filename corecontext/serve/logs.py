"""One JSON line for each thing that happens, without a word of any prompt or answer."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone


class JsonLines(logging.Formatter):
    """Time, level, event, and the fields given as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["trace"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}" for frame in _frames(record)
            ]
        return json.dumps(line, ensure_ascii=True)


def _frames(record: logging.LogRecord):
    import traceback

    return traceback.extract_tb(record.exc_info[2])  # type: ignore[index]


def start_logging() -> None:
    """Write the server's lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("corecontext.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name.startswith("corecontext") else logging.WARNING)


def log_event(event: str, *, level: str = "info", **fields: object) -> None:
    """Write one line of the server's own."""
    logging.getLogger("corecontext.serve").log(
        getattr(logging, level.upper()), event, extra={"fields": fields}
    )
