"""The HTTP interface: the OpenAI protocol's completions, chat and models; health, readiness and
metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from corecontext.inference.sampling import Sampling
from corecontext.serve import protocol
from corecontext.serve.guard import Guard, Refusal, error_body
from corecontext.serve.metrics import Metrics, setting
from corecontext.serve.scheduler import Job, QueueFull, Scheduler
from corecontext.serve.text import TextStream, chat_prompt, token_numbers
from corecontext.serve.worker import Answer, Draining, Failed, Worker, error_of

log = logging.getLogger("corecontext.serve")
REFUSALS = {
    400: "The request breaks a rule; the message says which.",
    401: "The key is missing or wrong.",
    404: "No such model.",
    408: "The request took longer than its time limit.",
    413: "The body is too large.",
    429: "The queue is full.",
    503: "The server shuts down, or ran out of memory.",
}


@dataclass(frozen=True)
class Options:
    """What the HTTP interface needs to know besides the scheduler."""

    model_name: str
    """What clients call the model."""
    api_key: str | None = None
    """Asked of every request under /v1; None asks nothing."""
    time_limit_s: float = 600.0
    """Requests that take longer are ended with an error."""
    default_max_tokens: int = 1024
    """Longest chat answer where the client sets no limit, as far as the model's length allows."""


def create_app(scheduler: Scheduler, tokenizer: Any, options: Options) -> FastAPI:
    """The application; the model's thread starts and ends with it. `app.state.worker` runs the
    model.

    Args:
        scheduler: Runs the model, which nobody else may use meanwhile.
        tokenizer: The model's.
    """
    service = Service(scheduler, tokenizer, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        log.info("started", extra={"fields": {"model": options.model_name}})
        yield
        await asyncio.to_thread(service.worker.stop)
        log.info("stopped")

    app = FastAPI(
        title="corecontext",
        summary="Core Context Aware attention behind the OpenAI protocol.",
        version=_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.worker, app.state.service = service.worker, service
    app.add_middleware(
        Guard,
        api_key=options.api_key,
        worker=service.worker,
        metrics=service.metrics,
        max_bytes=2**20 + 32 * scheduler.max_length,
    )
    refusals: dict[int | str, dict[str, Any]] = {
        code: {"model": protocol.Error, "description": text} for code, text in REFUSALS.items()
    }
    data = {"data": {"type": "string", "description": "A chunk as JSON, or [DONE]."}}
    streams: dict[int | str, dict[str, Any]] = {
        200: {
            "model": protocol.Answer,
            "content": {"text/event-stream": {"schema": {"type": "object", "properties": data}}},
        }
    }

    @app.post("/v1/completions", responses={**refusals, **streams}, tags=["openai"])
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await service.answer(request, body, body.single, body.max_tokens or 16, chat=False)

    @app.post("/v1/chat/completions", responses={**refusals, **streams}, tags=["openai"])
    async def chat(body: protocol.ChatRequest, request: Request) -> Response:
        """Answer the last message of a chat."""
        try:
            prompt = chat_prompt(
                tokenizer, [(message.role, message.text) for message in body.messages]
            )
        except ValueError as error:
            raise Refusal(400, str(error), param="messages") from None
        return await service.answer(
            request, body, prompt, body.max_completion_tokens or body.max_tokens, chat=True
        )

    @app.get(
        "/v1/models",
        response_model=protocol.Models,
        responses={401: refusals[401]},
        tags=["openai"],
    )
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [service.model_card]}

    @app.get(
        "/v1/models/{name:path}",
        response_model=protocol.Model,
        tags=["openai"],
        responses={code: refusals[code] for code in (400, 401, 404)},
    )
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        service.check_model(name)
        return service.model_card

    unready: dict[int | str, dict[str, Any]] = {
        503: {"model": protocol.Status, "description": "Not now."}
    }

    @app.get("/health", response_model=protocol.Status, responses=unready, tags=["operation"])
    async def health() -> Any:
        """Whether the model's thread lives."""
        return (
            _status("ok")
            if service.worker.alive
            else JSONResponse(_status("the model's thread has ended"), 503)
        )

    @app.get("/ready", response_model=protocol.Status, responses=unready, tags=["operation"])
    async def ready() -> Any:
        """Whether requests are taken."""
        if service.worker.draining or not service.worker.alive:
            return JSONResponse(_status("draining"), 503)
        return _status("ready")

    @app.get(
        "/metrics",
        tags=["operation"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    async def metrics() -> Response:
        """What Prometheus reads."""
        return Response(
            service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Refusal, _refusal)
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schema = made()  # what is invalid is refused with 400, and a key may be asked for
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("CompletionRequest", "ChatRequest"):
            schema["components"]["schemas"][name]["properties"]["model"]["enum"] = [
                options.model_name
            ]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


class Service:
    """Answers requests: checks them, hands them to the worker, and sends what comes back."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any, options: Options) -> None:
        self.scheduler, self.tokenizer, self.options = scheduler, tokenizer, options
        self.metrics = Metrics(scheduler)
        self.fingerprint = (
            "replica-" + uuid.uuid4().hex[:8]
        )  # which of several servers gave an answer
        self.worker = Worker(scheduler, self._ended)
        self._tokenizing = ThreadPoolExecutor(
            1, "corecontext-tokenizer"
        )  # long prompts take a while
        eos = scheduler.model.generation_config.eos_token_id
        self._eos = frozenset([eos] if isinstance(eos, int) else eos or [])
        self._vocabulary = scheduler.model.config.get_text_config(decoder=True).vocab_size
        self.model_card = {
            "id": options.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "corecontext",
            "max_model_len": scheduler.max_length,
        }

    def check_model(self, name: str) -> None:
        """Refuse any name but the model's."""
        if name != self.options.model_name:
            raise Refusal(
                404,
                f"model {name[:100]!a} is not served here. Use {self.options.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def answer(
        self,
        request: Request,
        body: protocol.Request,
        prompt: str | list[int],
        limit: int | None,
        *,
        chat: bool,
    ) -> Response:
        """The response to either kind of request."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise Refusal(
                400,
                "stream_options must be given with stream, got it without.",
                param="stream_options",
            )
        arrived = time.monotonic()
        ids = await self._tokens(prompt, chat)
        if limit is None:
            limit = max(
                1, min(self.options.default_max_tokens, self.scheduler.max_length - len(ids))
            )
        job = Job(
            ids,
            limit,
            Sampling(
                1.0 if body.temperature is None else body.temperature, body.top_k, body.top_p or 1.0
            ),
            random.getrandbits(63) if body.seed is None else body.seed,
            frozenset() if body.ignore_eos else self._eos,
            body.group_size,
            body.window_size,
            deadline=arrived + self.options.time_limit_s,
            arrived=arrived,
        )
        try:
            answer = self.worker.submit(
                job, TextStream(self.tokenizer, body.stops, () if chat else ids)
            )
        except (ValueError, TypeError) as error:
            code = "context_length_exceeded" if "must fit" in str(error) else None
            raise Refusal(400, str(error), code=code) from None
        except QueueFull as error:
            raise Refusal(429, str(error), code="queue_full") from None
        except Draining as error:
            raise Refusal(503, str(error), code="draining") from None
        reply = Reply(self, answer, ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, chat)
        if body.stream:
            return Events(
                reply.events(bool(body.stream_options and body.stream_options.include_usage)),
                lambda: self.worker.cancel(answer),
            )
        try:
            text = await _unless_gone(request, reply.whole())
        finally:
            self.worker.cancel(answer)  # changes nothing where the request has ended
        return JSONResponse(text)

    async def _tokens(self, prompt: str | list[int], chat: bool) -> list[int]:
        """Token numbers of a prompt."""
        ids = (
            prompt
            if isinstance(prompt, list)
            else await asyncio.get_running_loop().run_in_executor(
                self._tokenizing, token_numbers, self.tokenizer, prompt, chat
            )
        )
        if not ids:
            raise Refusal(
                400, "prompt must have at least one token, got an empty one.", param="prompt"
            )
        if (
            max(ids) >= self._vocabulary
        ):  # a tokenizer may know tokens, too, that its model does not
            raise Refusal(
                400,
                f"prompt must hold token numbers below {self._vocabulary}, got {max(ids)}.",
                param="prompt",
            )
        return ids

    def _ended(self, job: Job) -> None:
        """Count and note a request that has ended; on the worker's thread."""
        now = time.monotonic()
        self.metrics.ended(job, now)
        g, s = setting(job)
        log.log(
            logging.ERROR if job.ended == "error" else logging.INFO,
            "request",
            extra={
                "fields": {
                    "outcome": job.ended,
                    "prompt_tokens": len(job.prompt),
                    "cached_tokens": job.cached_tokens,
                    "completion_tokens": job.made,
                    "group_size": g,
                    "window_size": s,
                    "queued_s": None
                    if job.started is None
                    else round(job.started - job.arrived, 4),
                    "first_token_s": None
                    if job.time_to_first_token is None
                    else round(job.time_to_first_token, 4),
                    "total_s": round(now - job.arrived, 4),
                    **error_of(job),
                }
            },
        )


class Reply:
    """An answer in the protocol's words."""

    def __init__(self, service: Service, answer: Answer, name: str, chat: bool) -> None:
        self.service, self.answer, self.chat = service, answer, chat
        self.head = {
            "id": name,
            "object": ("chat.completion" if chat else "text_completion"),
            "created": int(time.time()),
            "model": service.options.model_name,
            "system_fingerprint": service.fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        job = self.answer.job
        return {
            "prompt_tokens": len(job.prompt),
            "completion_tokens": job.made,
            "total_tokens": len(job.prompt) + job.made,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
        }

    def _settings(self) -> dict[str, Any]:
        return dict(zip(("group_size", "window_size"), setting(self.answer.job)))

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        try:
            text = "".join([piece async for piece in self.answer.pieces()])
        except Failed as error:
            raise _as_refusal(error, self.answer.job) from None
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self.answer.finish_reason,
            "logprobs": None,
        }
        choice |= (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.chat
            else {"text": text}
        )
        return {
            **self.head,
            "choices": [choice],
            "usage": self._usage(),
            "corecontext": self._settings(),
        }

    async def events(self, include_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events; an error is the last one."""
        head = {**self.head, "object": "chat.completion.chunk" if self.chat else "text_completion"}
        usage = {"usage": None} if include_usage else {}

        def event(piece: str | None, reason: str | None = None, **delta: str) -> str:
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
            text = {} if piece is None else {"content": piece}
            choice |= {"delta": {**delta, **text}} if self.chat else {"text": piece or ""}
            return _event({**head, "choices": [choice], **usage, "corecontext": self._settings()})

        try:
            first = {"role": "assistant"} if self.chat else {}
            async for piece in self.answer.pieces():
                yield event(piece, **first)
                first = {}
            yield event(None, self.answer.finish_reason, **first)
            if include_usage:
                yield _event(
                    {**head, "choices": [], "usage": self._usage(), "corecontext": self._settings()}
                )
            yield "data: [DONE]\n\n"
        except Failed as error:
            refusal = _as_refusal(error, self.answer.job)
            yield _event(refusal.body)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"  # in ASCII, since many clients take U+2028 and its like for ends of lines


def _as_refusal(error: Failed, job: Job) -> Refusal:
    """A request that failed, as the client is told."""
    if error.reason == "error" and "memory" not in str(error):
        return Refusal(500, str(error), kind="server_error", code="internal_error")
    return Refusal(
        408 if error.reason == "timeout" else 503,
        str(error),
        kind="server_error",
        code=error.reason,
    )


class Events(Response):
    """Server-sent events that end as soon as the client has gone.

    Args:
        events: The text of each.
        on_close: Called when the response is over, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.on_close = events, on_close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                await send(
                    {"type": "http.response.body", "body": event.encode(), "more_body": True}
                )
            await send({"type": "http.response.body", "body": b""})

        try:
            await _first_of(write(), _disconnected(receive))
        finally:
            self.on_close()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: Any, gone: Any) -> Any:
    """What the work gives, or None as soon as the client has gone; the other one is cancelled."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_gone(request: Request, work: Any) -> Any:
    return await _first_of(work, _disconnected(request.receive))


async def _invalid(request: Request, error: Any) -> Response:
    """The first thing that is wrong with a body, by the name of its field."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        message, where = f"the body must be JSON: {first['ctx']['error']}.", []
    elif first["type"] == "extra_forbidden":
        message = f"field {'.'.join(where)[:100]!a} is not supported. Leave it out."
    elif first["type"] == "missing":
        message = (
            f"field {'.'.join(where)[:100]!a} must be given."
            if where
            else "the body must be JSON, got none."
        )
    else:
        message = f"{'.'.join(where) or 'the body'} is not valid: {first['msg']}."
    return error_body(400, message, param=where[0] if where else None)


async def _http(request: Request, error: Any) -> Response:
    """Unknown paths and methods."""
    message = {
        404: "there is no such path. See /openapi.json.",
        405: "the method is not allowed here.",
    }
    return error_body(
        error.status_code, message.get(error.status_code, str(error.detail)), headers=error.headers
    )


async def _refusal(request: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status)


def _status(text: str) -> dict[str, str]:
    return {"status": text}


def _version() -> str:
    from corecontext import __version__

    return __version__
