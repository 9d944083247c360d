"""Log one JSON line for each event, without a word of any prompt or answer."""

import json
import logging
import sys
import traceback
from datetime import datetime, timezone


class JsonLines(logging.Formatter):
    """Format time, level, event, and the fields given as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        # Of a message of many lines the first: asyncio quotes errors in the others.
        # mutant serve: the text of an error in the log
        event = record.getMessage().partition("\n")[0]
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "event": event,
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["trace"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(record.exc_info[2])
            ]
        # mutant serve: a line break forges a log line
        return json.dumps(line, ensure_ascii=True)


def start_logging() -> None:
    """Write the events of the server, of asyncio and of uvicorn to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("corecontext.serve", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("corecontext.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def log_event(event: str, *, level: str = "info", **fields: object) -> None:
    """Log an event of the server itself, such as its start."""
    logging.getLogger("corecontext.serve").log(
        getattr(logging, level.upper()), event, extra={"fields": fields}
    )
