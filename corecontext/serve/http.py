"""Serve the OpenAI protocol over HTTP: completions, chat and models; health, readiness and
metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

import corecontext
from corecontext.data.chat import chat_prompt
from corecontext.inference.sampling import Sampling
from corecontext.loading import begins_too_long
from corecontext.serve import protocol
from corecontext.serve.errors import Code, InvalidRequest, RequestError, invalid_body
from corecontext.serve.guard import Guard, error_response, is_loopback
from corecontext.serve.logprobs_writer import LogprobsWriter
from corecontext.serve.metrics import Metrics, sizes_of
from corecontext.serve.reply import Choice, Events, Reply, unless_gone
from corecontext.serve.request import Request, Slot
from corecontext.serve.scheduler import Scheduler
from corecontext.serve.settings import Serving
from corecontext.serve.text import TextStream, token_numbers
from corecontext.serve.token_text import TokenText
from corecontext.serve.worker import Answer, Worker, error_of

log = logging.getLogger("corecontext.serve")
Responses = dict[int | str, dict[str, Any]]  # FastAPI's description of an endpoint's answers
ERRORS = {
    400: "The request breaks a rule; the message says which.",
    401: "The key is missing or wrong.",
    403: "The Host header is not this machine's.",
    404: "No such model.",
    408: "The body, or the answer, took longer than its time limit.",
    413: "The body is too large.",
    429: "The queue is full.",
    503: "The server shuts down, or ran out of memory.",
}
"""Statuses of refused requests, for the schema."""
DEFAULT_MAX_TOKENS = 1024
"""Longest chat answer where the client sets no limit, as far as the model's length allows."""
MOST_BODY_TOKENS = 2**22
"""Tokens of the longest body, also where the model has no limit of its own."""
Body = protocol.CompletionRequest | protocol.ChatRequest


def create_app(scheduler: Scheduler, tokenizer: Any, serving: Serving) -> FastAPI:
    """Make the application; the model's thread starts and ends with it.

    `app.state.worker` runs the model, `app.state.service` answers requests.

    Args:
        scheduler: Runs the model, which no other code may use meanwhile.
        tokenizer: The model's.
        serving: Gives the model's name, the key and the time limit.
    """
    service = Service(scheduler, tokenizer, serving)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        log.info("started", extra={"fields": {"model": serving.model_name}})
        yield
        await asyncio.to_thread(service.worker.stop)
        log.info("stopped")

    app = FastAPI(
        title="corecontext",
        summary="Core Context Aware attention behind the OpenAI protocol.",
        version=corecontext.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to the host of the request's header
    )
    app.state.worker = service.worker
    app.state.service = service
    app.add_middleware(
        Guard,
        api_key=serving.api_key,
        worker=service.worker,
        metrics=service.metrics,
        max_bytes=2**20 + 32 * min(scheduler.max_length, MOST_BODY_TOKENS),
        local=serving.api_key is None and is_loopback(serving.host),
    )
    _add_openai_routes(app, service)
    _add_operation_routes(app, service)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _no_such_path)
    app.add_exception_handler(RequestError, _refused)
    _finish_schema(app, serving.model_name)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints of the OpenAI protocol."""
    errors: Responses = {
        status: {"model": protocol.Error, "description": text} for status, text in ERRORS.items()
    }
    chunk = {"data": {"type": "string", "description": "A chunk as JSON, or [DONE]."}}
    events = {"text/event-stream": {"schema": {"type": "object", "properties": chunk}}}
    responses: Responses = {**errors, 200: {"model": protocol.Answer, "content": events}}

    @app.post("/v1/completions", responses=responses, tags=["openai"])
    async def completions(body: protocol.CompletionRequest, request: HttpRequest) -> Response:
        """Continue a text."""
        if body.max_tokens == 0 and not body.echo:
            text = "max_tokens must be at least 1 without echo, got 0."
            raise InvalidRequest(Code.INVALID, text, "max_tokens")
        limit = 16 if body.max_tokens is None else body.max_tokens
        return await service.answer(request, body, body.prompts, limit)

    @app.post("/v1/chat/completions", responses=responses, tags=["openai"])
    async def chat(body: protocol.ChatRequest, request: HttpRequest) -> Response:
        """Answer the last message of a chat."""
        messages = [(message.role, message.text) for message in body.messages]
        try:
            prompt = chat_prompt(service.tokenizer, messages)
        except ValueError as error:
            raise InvalidRequest(Code.INVALID, str(error), "messages") from None
        if body.top_logprobs is not None and not body.logprobs:
            text = "top_logprobs must be given with logprobs, got it without."
            raise InvalidRequest(Code.INVALID, text, "top_logprobs")
        limit = body.max_completion_tokens or body.max_tokens
        return await service.answer(request, body, [prompt], limit)

    @app.get("/v1/models", responses={401: errors[401]}, tags=["openai"])
    async def models() -> protocol.Models:
        """List the served model."""
        return protocol.Models(data=[service.model_card])

    refusals: Responses = {status: errors[status] for status in (400, 401, 404)}

    @app.get("/v1/models/{name:path}", responses=refusals, tags=["openai"])
    async def model(name: str) -> protocol.Model:
        """Describe a model."""
        service.check_model(name)
        return service.model_card


def _add_operation_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints for whoever operates the server."""
    unready: Responses = {503: {"model": protocol.Status, "description": "Not now."}}
    worker = service.worker

    @app.get("/health", responses=unready, tags=["operation"])
    async def health(response: Response) -> protocol.Status:
        """Tell whether the model's thread lives."""
        if worker.alive:
            return protocol.Status(status="ok")
        response.status_code = 503
        return protocol.Status(status="the model's thread has ended")

    @app.get("/ready", responses=unready, tags=["operation"])
    async def ready(response: Response) -> protocol.Status:
        """Tell whether requests are taken."""
        if worker.alive and not worker.draining:
            return protocol.Status(status="ready")
        response.status_code = 503
        return protocol.Status(status="draining")

    @app.get("/metrics", response_class=PlainTextResponse, tags=["operation"])
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        page = generate_latest(service.metrics.registry)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def _finish_schema(app: FastAPI, model_name: str) -> None:
    """Correct the schema: invalid bodies get 400 instead of 422, and one model is served."""
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make_schema()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("CompletionRequest", "ChatRequest"):
            properties = schema["components"]["schemas"][name]["properties"]
            properties["model"]["enum"] = [model_name]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


class Service:
    """Answer requests: check them, hand them to the worker, and send its tokens back."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any, serving: Serving) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.serving = serving
        self.metrics = Metrics(scheduler)
        self.fingerprint = "replica-" + uuid.uuid4().hex[:8]
        """Tells clients which of several servers gave an answer."""
        self.worker = Worker(scheduler, self._ended)
        # Long prompts take a while, which must not hold up the event loop.
        self._texts = TokenText(tokenizer)
        self._tokenizing = ThreadPoolExecutor(1, "corecontext-tokenizer")
        eos = scheduler.model.generation_config.eos_token_id
        self._eos = frozenset([eos] if isinstance(eos, int) else eos or [])
        self._vocabulary = scheduler.model.config.get_text_config(decoder=True).vocab_size
        self.model_card = protocol.Model(
            id=serving.model_name, created=int(time.time()), max_model_len=scheduler.max_length
        )

    def check_model(self, name: str) -> None:
        """Refuse any name but the model's."""
        if name != self.serving.model_name:
            raise RequestError(
                Code.UNKNOWN_MODEL,
                f"model {name[:100]!a} is not served here. Use {self.serving.model_name!r}.",
                "model",
            )

    async def answer(
        self,
        request: HttpRequest,
        body: Body,
        prompts: Sequence[str | list[int]],
        limit: int | None,
    ) -> Response:
        """Return the response to either kind of request.

        Args:
            prompts: Texts, or token numbers; each gets an answer.
            limit: Most new tokens; None is up to the server.
        """
        arrived = time.monotonic()
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                Code.INVALID,
                "stream_options must be given with stream, got it without.",
                "stream_options",
            )
        chat = isinstance(body, protocol.ChatRequest)
        tokens = [await self._tokens(prompt, chat) for prompt in prompts]
        answers: list[Answer] = []

        def cancel() -> None:
            for answer in answers:
                self.worker.cancel(answer)  # without effect where it has ended

        try:
            for ids in tokens:
                answers.append(self._submit(body, ids, limit, arrived))
            choices = [
                self._choice(index, answer, body, prompt)
                for index, (answer, prompt) in enumerate(zip(answers, prompts))
            ]
        except BaseException:
            cancel()
            raise
        reply = Reply(choices, self.serving.model_name, self.fingerprint, chat)
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return Events(reply.events(include_usage), cancel)
        try:
            whole = await unless_gone(request.receive, reply.whole())
        finally:
            cancel()
        return JSONResponse(whole)

    def _submit(
        self,
        body: Body,
        ids: list[int],
        limit: int | None,
        arrived: float,
    ) -> Answer:
        """Hand a prompt to the worker.

        Raises:
            RequestError: it cannot run, or its settings break a rule.
        """
        context = () if isinstance(body, protocol.ChatRequest) else ids
        text = TextStream(self.tokenizer, body.stops, context)
        try:
            return self.worker.submit(self._request(body, ids, limit, arrived), text)
        except RequestError:
            raise
        except (ValueError, TypeError) as error:  # of the request's settings
            raise InvalidRequest(Code.INVALID, str(error)) from None

    def _choice(
        self,
        index: int,
        answer: Answer,
        body: Body,
        prompt: str | list[int],
    ) -> Choice:
        """Return the choice that an answer becomes."""
        chat = isinstance(body, protocol.ChatRequest)
        ids = answer.request.prompt
        before = ""
        if isinstance(prompt, str) and not chat:
            before = prompt
        elif not chat:
            before = self.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        writer = None
        if body.top is not None:
            start = len(before)
            if body.echo:
                start -= self._texts.length(ids)
            writer = LogprobsWriter(self._texts, chat, start)
        return Choice(answer, index, before, bool(body.echo), writer)

    def _request(
        self,
        body: Body,
        ids: list[int],
        limit: int | None,
        arrived: float,
    ) -> Request:
        """Translate a body to a request of the scheduler."""
        if limit is None:
            left = self.scheduler.max_length - len(ids)
            limit = max(1, min(DEFAULT_MAX_TOKENS, left))
        temperature = 1.0 if body.temperature is None else body.temperature
        return Request(
            ids,
            limit,
            Sampling(temperature, body.top_k, body.top_p or 1.0),
            random.getrandbits(63) if body.seed is None else body.seed,
            frozenset() if body.ignore_eos else self._eos,
            body.group_size,
            body.window_size,
            body.fetch_groups,
            deadline=arrived + self.serving.time_limit_s,
            arrived=arrived,
            logprobs=body.top,
            prompt_logprobs=bool(body.echo) and body.top is not None,
        )

    async def _tokens(self, prompt: str | list[int], chat: bool) -> list[int]:
        """Return the token numbers of a prompt."""
        ids = prompt
        if isinstance(ids, str):
            ids = await asyncio.get_running_loop().run_in_executor(
                self._tokenizing, self._encode, ids, chat
            )
        if not ids:
            raise InvalidRequest(
                Code.INVALID, "prompt must have at least one token, got an empty one.", "prompt"
            )
        # A tokenizer, too, may have tokens that its model does not.
        if max(ids) >= self._vocabulary:
            raise InvalidRequest(
                Code.INVALID,
                f"prompt must hold token numbers below {self._vocabulary}, got {max(ids)}.",
                "prompt",
            )
        return ids

    def _encode(self, text: str, chat: bool) -> list[int]:
        """Return the token numbers of a text; on the tokenizer's thread."""
        limit = self.scheduler.max_length
        if begins_too_long(self.tokenizer, text, limit):
            raise InvalidRequest(
                Code.TOO_LONG,
                f"prompt and answer must fit {limit} tokens, got a prompt of more. Shorten it.",
                "prompt",
            )
        return token_numbers(self.tokenizer, text, chat)

    def _ended(self, slot: Slot) -> None:
        """Count and log a request that has ended; on the worker's thread."""
        now = time.monotonic()
        self.metrics.ended(slot, now)
        g, s, k = sizes_of(slot)
        arrived = slot.request.arrived
        fields = {
            "outcome": slot.end_reason,
            "prompt_tokens": len(slot.request.prompt),
            "cached_tokens": slot.cached_tokens,
            "completion_tokens": slot.made,
            "group_size": g,
            "window_size": s,
            "fetch_groups": k,
            "queued_s": _seconds(arrived, slot.started),
            "first_token_s": _seconds(arrived, slot.first_token_at),
            "total_s": _seconds(arrived, now),
            **error_of(slot),
        }
        level = logging.ERROR if slot.end_reason == "error" else logging.INFO
        log.log(level, "request", extra={"fields": fields})


def _seconds(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 4)


async def _invalid_body(request: HttpRequest, error: Any) -> Response:
    return error_response(invalid_body(error.errors()[0]))


async def _no_such_path(request: HttpRequest, error: Any) -> Response:
    """Report unknown paths and methods."""
    messages = {
        404: "there is no such path. See /openapi.json.",
        405: "the method is not allowed here.",
    }
    message = messages.get(error.status_code, str(error.detail))
    body = RequestError(Code.INVALID, message).body
    return JSONResponse(body, error.status_code, error.headers)


async def _refused(request: HttpRequest, error: Any) -> Response:
    return error_response(error)
