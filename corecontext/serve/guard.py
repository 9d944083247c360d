"""Check each request before it is read: its host and headers, the key, the size and time of its
body, and the shutdown."""

import asyncio
import hmac
import ipaddress
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from corecontext.serve.errors import Code, RequestError, draining

BODY_S = 60.0
"""Seconds for the body of a request."""
CLOSE = {"Connection": "close"}
"""Header of an answer after which the connection is closed, since the body was not read."""


def is_loopback(host: str) -> bool:
    """Whether only its own machine reaches a server that listens at this host."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Guard:
    """ASGI middleware in front of all paths; under /v1 it asks for the key and counts errors.

    Args:
        api_key: Key that clients must send as `Authorization: Bearer KEY`; compared in constant
            time. None asks for no key.
        worker: While it is `draining`, new requests are refused.
        metrics: Has the counter `refused`.
        max_bytes: Of the longest body.
        local: Whether to refuse a Host header other than localhost or an address: a web page could
            else reach this machine by the page's own host name (DNS rebinding).
    """

    def __init__(
        self,
        app: Any,
        api_key: str | None,
        worker: Any,
        metrics: Any,
        max_bytes: int,
        local: bool = False,
    ) -> None:
        self.app = app
        self.worker = worker
        self.metrics = metrics
        self.max_bytes = max_bytes
        self.local = local
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # A proxy may have put a prefix before the path.
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        is_api = path.startswith("/v1/")

        async def counted(message: Any) -> None:
            """Send a part of the answer; count it if it begins an error."""
            # mutant serve: invalid requests are not counted
            if is_api and message["type"] == "http.response.start" and message["status"] >= 400:
                self.metrics.refused.labels(str(message["status"])).inc()
            await send(message)

        headers = dict(scope["headers"])
        refusal = self._refuse_anywhere(headers)
        if refusal is None and is_api:  # other paths, such as /health, need no key
            refusal = self._refuse_api(headers, scope["method"])
        if refusal is not None:
            await refusal(scope, receive, counted)
            return

        # The body is checked as the application reads it.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BODY_S
        size = 0
        is_whole = False
        late = False

        async def limited() -> Any:
            """Receive a part of the body. A body that is too long or too late runs nothing: it ends
            as if its client had gone, and the application's answer to that is not sent."""
            nonlocal size, is_whole, late
            if is_whole:
                return await receive()
            try:
                # mutant serve: a body without deadline
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except asyncio.TimeoutError:
                late = True
            else:
                size += len(message.get("body", b""))
                is_whole = not message.get("more_body") and size <= self.max_bytes
            if late or size > self.max_bytes:
                return {"type": "http.disconnect"}
            return message

        async def unless_refused(message: Any) -> None:
            """Send a part of the application's answer, unless the body was refused."""
            if not late and size <= self.max_bytes:
                await counted(message)

        # To the application, the client of a refused body has left: the answer is sent here.
        await self.app(scope, limited, unless_refused)
        if size > self.max_bytes:
            await self._too_large()(scope, receive, counted)
        elif late:
            await self._late()(scope, receive, counted)

    def _refuse_anywhere(self, headers: dict[bytes, bytes]) -> JSONResponse | None:
        """Return the refusal of a request to any path by its headers, or None."""
        # mutant serve: two lengths of one body
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy may go by the other, and take the rest of the body for a request.
            text = "the body must have Content-Length or Transfer-Encoding, got both."
            return error_response(RequestError(Code.INVALID, text), CLOSE)
        host = _host_name(headers.get(b"host", b"localhost").decode("latin-1"))
        # mutant serve: any host name reaches a server without a key
        if self.local and host != "localhost" and not _is_address(host):
            text = (
                f"the Host header must be localhost or an address, got {host[:100]!a}. Send that, "
                "or set an API key."
            )
            return error_response(RequestError(Code.WRONG_HOST, text))
        return None

    def _refuse_api(self, headers: dict[bytes, bytes], method: str) -> JSONResponse | None:
        """Return the refusal of a request under /v1 by its headers, or None."""
        if self._key is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            # mutant serve: a key that only begins right
            # mutant serve: the time of a comparison tells how far a key is right
            matches = hmac.compare_digest(key.strip(), self._key)
            # mutant serve: the right key under any scheme
            if scheme.lower() != b"bearer" or not matches:
                return error_response(
                    RequestError(
                        Code.WRONG_KEY,
                        "the API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.",
                    ),
                    {"WWW-Authenticate": "Bearer"},
                )
        if method == "POST" and self.worker.draining:
            return error_response(draining())
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> JSONResponse:
        text = f"the body must have at most {self.max_bytes} bytes. Shorten the prompt."
        return error_response(RequestError(Code.BODY_TOO_LARGE, text))

    def _late(self) -> JSONResponse:
        text = f"the body must arrive within {BODY_S:g} seconds. Send it again."
        return error_response(RequestError(Code.TIMEOUT, text), CLOSE)


def _host_name(header: str) -> str:
    """Return the host of a Host header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error as a response, with the status of its code."""
    return JSONResponse(error.body, error.code.status, headers)
