"""Define the errors of requests: a code, which fixes the HTTP status, and a message."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Code(Enum):
    """Reasons of errors: (HTTP status, the OpenAI protocol's type, its code)."""

    INVALID = (400, "invalid_request_error", None)
    TOO_LONG = (400, "invalid_request_error", "context_length_exceeded")
    WRONG_KEY = (401, "invalid_request_error", "invalid_api_key")
    WRONG_HOST = (403, "invalid_request_error", "wrong_host")
    UNKNOWN_MODEL = (404, "invalid_request_error", "model_not_found")
    TIMEOUT = (408, "server_error", "timeout")
    BODY_TOO_LARGE = (413, "invalid_request_error", "body_too_large")
    QUEUE_FULL = (429, "invalid_request_error", "queue_full")
    INTERNAL = (500, "server_error", "internal_error")
    OUT_OF_MEMORY = (503, "server_error", "error")
    CANCELLED = (503, "server_error", "cancelled")
    DRAINING = (503, "server_error", "draining")

    def __init__(self, status: int, kind: str, protocol_code: str | None) -> None:
        self.status = status
        self.kind = kind
        self.protocol_code = protocol_code


class RequestError(Exception):
    """A request that gets no answer, or only a part of it.

    Args:
        code: The reason.
        message: For the client: the rule, and the way out.
        param: Field of the request that breaks the rule.
    """

    def __init__(self, code: Code, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The error in the protocol's form."""
        error = {
            "message": str(self),
            "type": self.code.kind,
            "param": self.param,
            "code": self.code.protocol_code,
        }
        return {"error": error}


class InvalidRequest(RequestError, ValueError):
    """A request that breaks a rule."""


def draining() -> RequestError:
    """Return the error of new requests during a shutdown."""
    return RequestError(
        Code.DRAINING, "the server is shutting down and takes no more requests. Try another one."
    )


def internal_error() -> RequestError:
    """Return the error of a request that failed for a reason that only the log tells."""
    return RequestError(Code.INTERNAL, "the request failed inside the server, which has noted why.")


def invalid_body(detail: Mapping[str, Any]) -> InvalidRequest:
    """Translate one of pydantic's error details of a body; the message names the field."""
    # The client chose the names of unknown fields, so they are shown escaped and cut.
    path = [ascii(str(name))[1:-1][:100] for name in detail["loc"] if name != "body"]
    field = ".".join(path)[:100]
    kind = detail["type"]
    if kind == "json_invalid":
        path = []
        message = f"the body must be JSON: {detail['ctx']['error']}."
    elif kind == "extra_forbidden":
        message = f"field '{field}' is not supported. Leave it out."
    elif kind == "missing" and path:
        message = f"field '{field}' must be given."
    elif kind == "missing":
        message = "the body must be JSON, got none."
    elif kind == "value_error":
        message = f"{field} {detail['ctx']['error']}."
    elif not path:  # such as a list, or JSON under another content type
        message = (
            "the body must be a JSON object. Send it with the header 'Content-Type: "
            "application/json'."
        )
    elif kind == "rule":  # raised by protocol.py
        message = f"{field} {detail['msg']}."
    else:
        message = f"{field} is not valid: {detail['msg']}."
    return InvalidRequest(Code.INVALID, message, path[0] if path else None)
