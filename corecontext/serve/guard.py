"""What is checked before a request is read: the key, the size of its body, and whether any are
taken."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi.responses import JSONResponse


class Refusal(Exception):
    """A request that is not answered, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(status: int, message: str, headers: Any = None, **more: Any) -> JSONResponse:
    """A refusal as a response."""
    return JSONResponse(Refusal(status, message, **more).body, status, headers)


class Guard:
    """ASGI middleware in front of /v1; counts every refusal there.

    Args:
        api_key: What clients must send as `Authorization: Bearer KEY`; compared in constant time.
            None asks nothing.
        worker: Its `draining` closes the door to new work.
        metrics: Has the counter `refused`.
        max_bytes: Longest body.
    """

    def __init__(
        self, app: Any, api_key: str | None, worker: Any, metrics: Any, max_bytes: int
    ) -> None:
        self.app, self.worker, self.metrics, self.max_bytes = app, worker, metrics, max_bytes
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        path = scope["path"].removeprefix(
            scope.get("root_path", "")
        )  # which a proxy may have put before it
        asks = path.startswith("/v1/")  # and is no probe, which is told of a shutdown, too

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and asks:
                self.metrics.refused.labels(str(message["status"])).inc()
            await send(message)

        refusal = self._refuse(scope) if asks else None
        if refusal is not None:
            return await refusal(scope, receive, counted)
        size = 0

        async def limited() -> Any:
            """Parts of the body. Of one that is too long nothing is run: it ends as if its client
            had gone, and what the application says of it is not sent."""
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message if size <= self.max_bytes else {"type": "http.disconnect"}

        async def unless_too_large(message: Any) -> None:
            if size <= self.max_bytes:
                await counted(message)

        await self.app(scope, limited, unless_too_large)
        if size > self.max_bytes:
            await self._too_large()(scope, receive, counted)

    def _refuse(self, scope: Any) -> JSONResponse | None:
        """Why a request is turned away at the door, or None."""
        headers = dict(scope["headers"])
        if self._key is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            right = hmac.compare_digest(key.strip(), self._key)
            if scheme.lower() != b"bearer" or not right:
                return error_body(
                    401,
                    "the API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.",
                    {"WWW-Authenticate": "Bearer"},
                    code="invalid_api_key",
                )
        if scope["method"] == "POST" and self.worker.draining:
            return error_body(
                503,
                "the server is shutting down and takes no more requests. Try another one.",
                kind="server_error",
                code="draining",
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> JSONResponse:
        return error_body(
            413,
            f"the body must have at most {self.max_bytes} bytes. Shorten the prompt.",
            code="body_too_large",
        )
