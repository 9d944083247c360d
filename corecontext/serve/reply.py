"""Write answers in the OpenAI protocol's form, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi.responses import StreamingResponse

from corecontext.serve.errors import RequestError
from corecontext.serve.metrics import sizes_of
from corecontext.serve.request import Slot
from corecontext.serve.worker import Answer


class Reply:
    """An answer in the protocol's form.

    Args:
        answer: The pieces of its text.
        model_name: The model's name for clients.
        fingerprint: Names the server.
        chat: Whether it answers a chat.
    """

    def __init__(self, answer: Answer, model_name: str, fingerprint: str, chat: bool) -> None:
        assert answer.slot is not None, "an answer is of a submitted request"
        self.answer = answer
        self.slot: Slot = answer.slot
        self.chat = chat
        self.head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = len(self.slot.request.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.slot.made,
            "total_tokens": prompt_tokens + self.slot.made,
            "prompt_tokens_details": {"cached_tokens": self.slot.cached_tokens},
        }

    def _sizes(self) -> dict[str, Any]:
        group_size, window_size = sizes_of(self.slot)
        return {"group_size": group_size, "window_size": window_size}

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece.

        Raises:
            RequestError: the request ended without its answer.
        """
        text = "".join([piece async for piece in self.answer.pieces()])
        choice = _choice(self.answer.finish_reason)
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        usage = self._usage()
        return {**self.head, "choices": [choice], "usage": usage, "corecontext": self._sizes()}

    async def events(self, include_usage: bool) -> AsyncIterator[str]:
        """Yield the answer as server-sent events; an error is the last event."""
        head = dict(self.head)
        if self.chat:
            head["object"] = "chat.completion.chunk"
        usage = {"usage": None} if include_usage else {}

        def event(piece: str | None, reason: str | None = None) -> str:
            choice = _choice(reason)
            if self.chat:
                content = {} if piece is None else {"content": piece}
                choice["delta"] = {**role, **content}
            else:
                choice["text"] = piece or ""
            return _event({**head, "choices": [choice], **usage, "corecontext": self._sizes()})

        role = {"role": "assistant"}  # in the first event
        try:
            async for piece in self.answer.pieces():
                yield event(piece)
                role = {}
            yield event(None, self.answer.finish_reason)
            if include_usage:
                last = {"choices": [], "usage": self._usage(), "corecontext": self._sizes()}
                yield _event({**head, **last})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.body)


def _choice(finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish_reason, "logprobs": None}


def _event(body: dict[str, Any]) -> str:
    """Format an event in ASCII: many clients take U+2028 and its like for ends of lines."""
    return f"data: {json.dumps(body)}\n\n"


class Events(StreamingResponse):
    """Server-sent events that end as soon as the client has gone.

    Args:
        events: The text of each.
        on_close: Called when the response is over, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.on_close = on_close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        finally:
            self.on_close()


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Any) -> Any:
    """Return the result of `work`, or cancel it and return None as soon as the client has gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
