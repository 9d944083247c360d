"""Answer requests of the OpenAI protocol: check them, encode their prompts, run them, and reply."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.requests import Request as HttpRequest

from corecontext.inference.sampling import Sampling
from corecontext.loading import begins_too_long
from corecontext.serve import protocol
from corecontext.serve.ends import Ends
from corecontext.serve.errors import Code, InvalidRequest, RequestError
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
DEFAULT_MAX_TOKENS = 1024
"""Longest chat answer where the client sets no limit, as far as the model's length allows."""
Body = protocol.CompletionRequest | protocol.ChatRequest


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
        self._texts = TokenText(tokenizer)
        # To encode a long prompt takes a while, which must not hold up the event loop.
        self._tokenizing = ThreadPoolExecutor(1, "corecontext-tokenizer")
        self.ends = Ends.of(scheduler.model, tokenizer)
        self._vocabulary = scheduler.model.config.get_text_config(decoder=True).vocab_size
        self.model_card = protocol.Model(
            id=serving.model_name,
            created=int(time.time()),
            max_model_len=scheduler.max_length,
            has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
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
        """Return the response to a completion or chat request.

        Args:
            prompts: Texts, or token numbers; each gets an answer.
            limit: Most new tokens; None takes DEFAULT_MAX_TOKENS, or as many as fit.
        """
        # Check the body, and encode its prompts.
        arrived = time.monotonic()
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                Code.INVALID,
                "stream_options must be given with stream, got it without.",
                "stream_options",
            )
        chat = isinstance(body, protocol.ChatRequest)
        ids_of_prompts = [await self._tokens(prompt, chat) for prompt in prompts]

        # Submit a request for each prompt: all or none.
        answers: list[Answer] = []

        def cancel() -> None:
            for answer in answers:
                self.worker.cancel(answer)  # without effect where it has ended

        try:
            for ids in ids_of_prompts:
                answers.append(self._submit(body, ids, limit, arrived))
            choices = [
                self._choice(index, answer, body, prompt)
                for index, (answer, prompt) in enumerate(zip(answers, prompts))
            ]
        except BaseException:
            cancel()
            raise

        # Reply in pieces or whole; a client that goes cancels its requests.
        shape = self.scheduler.memory.shape
        reply = Reply(choices, self.serving.model_name, self.fingerprint, chat, shape)
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return Events(reply.events(include_usage), cancel)
        try:
            whole = await unless_gone(request.receive, reply.whole())
        finally:
            cancel()
        return JSONResponse(whole)

    def _submit(self, body: Body, ids: list[int], limit: int | None, arrived: float) -> Answer:
        """Hand a prompt to the worker.

        Raises:
            RequestError: it cannot run, or its settings break a rule.
        """
        chat = isinstance(body, protocol.ChatRequest)
        stops = [*body.stops, *(self.ends.chat_stops if chat else ())]
        text = TextStream(self.tokenizer, stops, () if chat else ids)
        try:
            return self.worker.submit(self._request(body, ids, limit, arrived), text)
        except RequestError:
            raise
        except (ValueError, TypeError) as error:  # of the request's settings
            raise InvalidRequest(Code.INVALID, str(error)) from None

    def _choice(self, index: int, answer: Answer, body: Body, prompt: str | list[int]) -> Choice:
        """Return the choice of the reply that an answer becomes."""
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
            if body.echo:  # the prompt's tokens are written first
                start -= self._texts.length(ids)
            writer = LogprobsWriter(self._texts, chat, start)
        return Choice(answer, index, before, bool(body.echo), writer)

    def _request(self, body: Body, ids: list[int], limit: int | None, arrived: float) -> Request:
        """Translate a body into a request to the scheduler."""
        if limit is None:
            left = self.scheduler.max_length - len(ids)
            limit = max(1, min(DEFAULT_MAX_TOKENS, left))
        ends = self.ends.tokens
        if isinstance(body, protocol.ChatRequest):
            ends = self.ends.chat_tokens
        temperature = 1.0 if body.temperature is None else body.temperature
        return Request(
            ids,
            limit,
            Sampling(temperature, body.top_k, body.top_p or 1.0),
            seed=random.getrandbits(63) if body.seed is None else body.seed,
            eos=frozenset() if body.ignore_eos else ends,
            group_size=body.group_size,
            window_size=body.window_size,
            fetch_groups=body.fetch_groups,
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
        # A tokenizer, like a client, may use token numbers that the model does not have.
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
