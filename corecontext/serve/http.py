"""Serve the OpenAI protocol over HTTP: completions, chat and models; health, readiness and
metrics."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

import corecontext
from corecontext.data.chat import chat_prompt
from corecontext.serve import protocol
from corecontext.serve.errors import Code, InvalidRequest, RequestError, invalid_body
from corecontext.serve.guard import Guard, error_response, is_loopback
from corecontext.serve.scheduler import Scheduler
from corecontext.serve.service import Service
from corecontext.serve.settings import Serving

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
"""HTTP statuses of errors and their meanings, for the schema."""
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of the page: it loads nothing, asks this server alone, and no other page embeds it."""
MOST_BODY_TOKENS = 2**22
"""Tokens by which a body is limited where the model takes more, or has no limit of its own."""


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
        # 1 MiB for settings, and more bytes a token than text has.
        max_bytes=2**20 + 32 * min(scheduler.max_length, MOST_BODY_TOKENS),
        # A foreign web page has no key; a server on another address may have any host name.
        local=serving.api_key is None and is_loopback(serving.host),
    )
    _add_openai_routes(app, service)
    _add_operation_routes(app, service)
    if serving.page:
        _add_page(app)
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
        limit = 16 if body.max_tokens is None else body.max_tokens  # 16: as the protocol says
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
        # Each is at least 1 or None; None of both lets the server choose (`Service.answer`).
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


def _add_page(app: FastAPI) -> None:
    """Add the page to try the model. It holds nothing secret: it asks by /v1, with the key that its
    user types in."""
    text = resources.files("corecontext").joinpath("assets/serve.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=PAGE_HEADERS)


def _finish_schema(app: FastAPI, model_name: str) -> None:
    """Correct the schema of /openapi.json: invalid bodies get 400, not 422; one model is served."""
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
