"""Check each request before it is read: the key, the size of its body, and the shutdown."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi.responses import JSONResponse

from corecontext.serve.errors import Code, RequestError, draining


class Guard:
    """ASGI middleware in front of /v1; counts every refusal there.

    Args:
        api_key: Key that clients must send as `Authorization: Bearer KEY`; compared in constant
            time. None asks for no key.
        worker: Its `draining` refuses new work.
        metrics: Has the counter `refused`.
        max_bytes: Longest body.
    """

    def __init__(
        self, app: Any, api_key: str | None, worker: Any, metrics: Any, max_bytes: int
    ) -> None:
        self.app = app
        self.worker = worker
        self.metrics = metrics
        self.max_bytes = max_bytes
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A proxy may have put a prefix before the path. Probes are answered during a shutdown, too.
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not path.startswith("/v1/"):
            await self.app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.metrics.refused.labels(str(message["status"])).inc()
            await send(message)

        refusal = self._refuse(scope)
        if refusal is not None:
            await refusal(scope, receive, counted)
            return
        size = 0

        async def limited() -> Any:
            """Receive a part of the body. A body that is too long runs nothing: it ends as if its
            client had gone, and the application's answer to that is not sent."""
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
        """Return the answer to a request that its headers refuse, or None."""
        headers = dict(scope["headers"])
        if self._key is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            # planted: serve: a key that only begins right
            # planted: serve: the time of a comparison tells how far a key is right
            matches = hmac.compare_digest(key.strip(), self._key)
            # planted: serve: the right key under any scheme
            if scheme.lower() != b"bearer" or not matches:
                return error_response(
                    RequestError(
                        Code.WRONG_KEY,
                        "the API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.",
                    ),
                    {"WWW-Authenticate": "Bearer"},
                )
        if scope["method"] == "POST" and self.worker.draining:
            return error_response(draining())
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> JSONResponse:
        return error_response(
            RequestError(
                Code.BODY_TOO_LARGE,
                f"the body must have at most {self.max_bytes} bytes. Shorten the prompt.",
            )
        )


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error as a response, with the status of its code."""
    return JSONResponse(error.body, error.code.status, headers)
