"""Generate load for a server: arrival times, prompts, and a client that measures each request."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = 256  # token numbers that every tokenizer has


@dataclass(frozen=True)
class Seen:
    """The client's measurements of one request, in seconds."""

    due: float
    """When it was due, since the start."""
    first_token_s: float | None
    """From the due time to the first piece of text: a late client counts against the server."""
    end: float
    """When it ended, since the start."""
    tokens: int
    """Tokens of the answer."""
    next_token_s: float | None
    """Mean of the tokens after the first."""
    setting: tuple[int | None, int | None]
    """The g and s that the answer names."""
    error: str | None = None


def day_rate(second: float, length: float, base: float, peak: float) -> float:
    """Return requests a second at a time of a day of this length.

    A raised cosine with its peak at 58 % of the day, squared so that half of the day is near the
    base.
    """
    phase = math.cos(2 * math.pi * (second / length - 0.58))
    return base + (peak - base) * ((1 + phase) / 2) ** 2


def arrivals(rate: Callable[[float], float], most: float, length: float, seed: int) -> list[float]:
    """Return the times of a Poisson process by thinning; the same for every run of a seed.

    Args:
        rate: Requests a second at a time, at most `most`.
        length: Seconds.
    """
    draw = random.Random(seed)
    now = 0.0
    times: list[float] = []
    while True:
        now += draw.expovariate(most)
        if now >= length:
            return times
        if draw.random() * most < rate(now):
            times.append(now)


def prompt_of(number: int, length: int, shared: int, seed: int) -> list[int]:
    """Return random token numbers; all requests of a seed share the first `shared` only."""
    common = random.Random(seed)
    distinct = random.Random(f"{seed} {number}")
    return [
        *(common.randrange(VOCABULARY) for _ in range(min(shared, length))),
        *(distinct.randrange(VOCABULARY) for _ in range(length - shared)),
    ]


async def replay(
    url: str,
    model: str,
    due: Sequence[float],
    prompts: Callable[[int], list[int]],
    new_tokens: int,
    on_done: Callable[[Seen], Any],
    key: str | None = None,
) -> list[Seen]:
    """Send requests when they are due, whether or not earlier ones were answered.

    Args:
        url: Of the server, without /v1.
        prompts: The prompt of each request by its number.
    """
    import httpx

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=limits, headers=headers
    ) as client:
        began = time.monotonic()

        async def request(number: int) -> Seen:
            await asyncio.sleep(max(0.0, due[number] - (time.monotonic() - began)))
            body = {
                "model": model,
                "prompt": prompts(number),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                seen = await _watch(client, body, began, due[number])
            except httpx.HTTPError as error:
                seen = _failed(due[number], began, type(error).__name__)
            on_done(seen)
            return seen

        return list(await asyncio.gather(*(request(number) for number in range(len(due)))))


def _failed(due: float, began: float, error: str) -> Seen:
    """Return a request without an answer."""
    return Seen(due, None, time.monotonic() - began, 0, None, (None, None), error)


async def _watch(client: Any, body: dict[str, Any], began: float, due: float) -> Seen:
    """Measure one request, event by event."""
    pieces: list[float] = []
    tokens = 0
    setting = (None, None)
    error = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return _failed(due, began, f"HTTP {response.status_code}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                error = event["error"]["code"] or event["error"]["type"]
                break
            if any(choice["text"] for choice in event["choices"]):
                pieces.append(time.monotonic() - began)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
                setting = event["corecontext"]["group_size"], event["corecontext"]["window_size"]
    if error is None and not (pieces and tokens):
        error = "no text"
    first = pieces[0] - due if pieces else None
    between = (pieces[-1] - pieces[0]) / (tokens - 1) if pieces and tokens > 1 else None
    return Seen(due, first, time.monotonic() - began, tokens, between, setting, error)
