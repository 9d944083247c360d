"""Bound what strangers can hold of a server: connections, and the time that a request takes to
arrive."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from corecontext.serve.guard import BODY_S

HEADERS_S = 20.0
"""Seconds for the headers of a request."""
LATER_S = 5.0
"""Seconds beyond those of a body (`BODY_S`), in which `Guard` answers a late one."""


def descriptor_limit() -> int:
    """Return how many files and sockets this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return 2048
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**16 if limit == resource.RLIM_INFINITY else limit


MOST_CONNECTIONS = descriptor_limit() * 3 // 4
"""The other quarter is for the model's files, the log and connections that are refused."""
BACKLOG = max(1, min(2048, descriptor_limit() // 16))
"""Connections that asyncio accepts in one go. It accepts a second batch before it calls
`connection_made` for the first."""


class Connection(H11Protocol):
    """A connection that is closed if a request does not arrive in time, or too many are open."""

    _phase: Any = None
    """The client's state in h11, such as `h11.SEND_BODY`, in which the deadline was set."""
    _deadline: asyncio.TimerHandle | None = None
    """The timer that closes the connection."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # mutant serve: connections without limit
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_deadline(None, 0.0)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def _watch(self) -> None:
        """Set a deadline as a phase of the request begins. The body's holds after the answer, too:
        a client may still send it."""
        seconds = {h11.IDLE: HEADERS_S, h11.SEND_BODY: BODY_S + LATER_S}
        phase = self.conn.their_state
        # mutant serve: each byte of the headers moves their deadline
        if phase is not self._phase:
            self._set_deadline(phase, seconds.get(phase, 0.0))

    def _set_deadline(self, phase: Any, seconds: float) -> None:
        """Replace the deadline; 0 seconds set none."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._phase = phase
        self._deadline = None
        # mutant serve: headers without deadline
        if seconds:
            self._deadline = self.loop.call_later(seconds, self.transport.abort)
