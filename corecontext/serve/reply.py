"""Write answers in the OpenAI protocol's form, whole or as server-sent events."""

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse

from corecontext.inference.policy import SIZE_NAMES
from corecontext.inference.room import RowShape
from corecontext.serve.errors import RequestError, internal_error
from corecontext.serve.logprobs_writer import LogprobsWriter
from corecontext.serve.metrics import sizes_of
from corecontext.serve.request import Slot
from corecontext.serve.worker import Answer

log = logging.getLogger("corecontext.serve")


@dataclass
class Choice:
    """One answer of a reply."""

    answer: Answer
    index: int
    prompt: str
    """Text before the answer; empty in a chat."""
    echo: bool = False
    """Whether the prompt is sent, too."""
    logprobs: LogprobsWriter | None = None
    """Writes log-probabilities, where they are asked for."""

    @property
    def slot(self) -> Slot:
        """The slot of the answer's request."""
        assert self.answer.slot is not None, "an answer is of a submitted request"
        return self.answer.slot

    async def pieces(self) -> AsyncIterator[tuple[str, dict[str, Any] | None]]:
        """Yield (piece of text, log-probabilities of further tokens that begin in the text so far).

        Raises:
            RequestError: the request ended without its answer.
        """
        end = len(self.prompt)
        if self.echo:
            yield self.prompt, None
        async for piece in self.answer.pieces():
            end += len(piece)
            yield piece, self._logprobs(end)
        # Tokens after a stop text are no part of the answer; an end-of-text token is one.
        rest = self._logprobs(end if self.answer.text.stopped else math.inf)
        if rest is not None:
            yield "", rest

    def _logprobs(self, end: float) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return self.logprobs.write(self.answer.logprobs, end)

    def body(self, **content: Any) -> dict[str, Any]:
        """Return the choice in the protocol's form, with these fields."""
        return {"index": self.index, "finish_reason": None, "logprobs": None, **content}


class Reply:
    """The reply to a request.

    Args:
        choices: An answer for each prompt.
        model_name: The model's name for clients.
        fingerprint: Names this one of several servers.
        chat: Whether it answers a chat.
        shape: Counts the bytes of caches.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        model_name: str,
        fingerprint: str,
        chat: bool,
        shape: RowShape,
    ) -> None:
        self.choices = choices
        self.shape = shape
        self.chat = chat
        self.head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        slots = [choice.slot for choice in self.choices]
        prompt_tokens = sum(len(slot.request.prompt) for slot in slots)
        made = sum(slot.made for slot in slots)
        # mutant serve: cached tokens of the first prompt alone
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": sum(slot.cached_tokens for slot in slots)},
            "cache_bytes": self._cache_bytes(),
        }

    def _cache_bytes(self) -> dict[str, int]:
        """Return the bytes of the prompts' and answers' caches, and full attention's."""
        device = host = full = 0
        for choice in self.choices:
            slot = choice.slot
            size = self.shape.bytes_of(slot.config, slot.length)
            device += size.device
            host += size.host
            full += self.shape.bytes_of(None, slot.length).device
        return {"device": device, "host": host, "full_attention": full}

    def _sizes(self) -> dict[str, Any]:
        """Return g, s and k; null where the policy gave several prompts different ones."""
        sizes = {sizes_of(choice.slot) for choice in self.choices}
        if len(sizes) > 1:
            return dict.fromkeys(SIZE_NAMES)
        return dict(zip(SIZE_NAMES, sizes.pop()))

    async def whole(self) -> dict[str, Any]:
        """Return the answers in one piece.

        Raises:
            RequestError: a request ended without its answer.
        """
        choices = [await self._whole(choice) for choice in self.choices]
        usage = self._usage()
        return {**self.head, "choices": choices, "usage": usage, "corecontext": self._sizes()}

    async def _whole(self, choice: Choice) -> dict[str, Any]:
        text = ""
        logprobs: dict[str, Any] | None = None
        async for piece, records in choice.pieces():
            text += piece
            if logprobs is None:
                logprobs = records
            elif records is not None:
                for name, values in records.items():
                    if values is not None:  # a chat's refusal
                        logprobs[name] += values
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        reason = choice.answer.finish_reason
        return choice.body(finish_reason=reason, logprobs=logprobs, **content)

    async def events(self, include_usage: bool) -> AsyncIterator[str]:
        """Yield the pieces of all answers as server-sent events, as they come; an error is last."""
        head = dict(self.head)
        if self.chat:
            head["object"] = "chat.completion.chunk"
        usage = {"usage": None} if include_usage else {}  # null in all events but the last
        queue: asyncio.Queue[dict[str, Any] | RequestError | None] = asyncio.Queue()

        async def read(choice: Choice) -> None:
            """Put the choice's pieces into the queue, then None or its error."""
            try:
                async for body in self._deltas(choice):
                    queue.put_nowait(body)
                queue.put_nowait(None)
            except RequestError as error:
                queue.put_nowait(error)
            except Exception:
                # Without an entry of the queue the client would wait for ever.
                log.exception("an answer could not be written")
                queue.put_nowait(internal_error())

        tasks = [asyncio.ensure_future(read(choice)) for choice in self.choices]
        num_running = len(tasks)
        try:
            while num_running:
                body = await queue.get()
                if isinstance(body, RequestError):
                    yield _event(body.body)
                    return
                if body is None:
                    num_running -= 1
                    continue
                yield _event({**head, "choices": [body], **usage, "corecontext": self._sizes()})
            if include_usage:
                last = {"choices": [], "usage": self._usage(), "corecontext": self._sizes()}
                yield _event({**head, **last})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    async def _deltas(self, choice: Choice) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of a choice in the protocol's form, and last its finish reason."""
        role = {"role": "assistant"}  # in the first event only
        async for piece, logprobs in choice.pieces():
            content: dict[str, Any] = {"text": piece}
            if self.chat:
                content = {"delta": {**role, "content": piece}}
            yield choice.body(logprobs=logprobs, **content)
            role = {}
        content = {"text": ""}
        if self.chat:
            content = {"delta": role}
        yield choice.body(finish_reason=choice.answer.finish_reason, **content)


def _event(body: dict[str, Any]) -> str:
    """Format an event in ASCII: many clients take U+2028 and its like for ends of lines."""
    return f"data: {json.dumps(body)}\n\n"


class Events(StreamingResponse):
    """Server-sent events that end as soon as the client has gone.

    Args:
        events: Each as a text, as `Reply.events` yields them.
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
