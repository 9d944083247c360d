"""Traffic for a server: when requests come, what they ask, and what the client sees of each."""

from __future__ import annotations

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
    """What the client saw of one request; seconds."""

    due: float
    """When it was to be sent, after the beginning."""
    first_token_s: float | None
    """From when it was due to the first piece of text: a client that is late counts against the
    server."""
    end: float
    """When it was over, after the beginning."""
    tokens: int
    """Made."""
    next_token_s: float | None
    """Mean of the tokens after the first."""
    setting: tuple[int | None, int | None]
    """The g and s that the answer names."""
    error: str | None = None


def day_rate(second: float, length: float, base: float, peak: float) -> float:
    """Requests a second at a time of a day of this length: a night, a rise, a peak after noon, an
    evening.

    A raised cosine whose peak lies at 58 % of the day, narrowed so that half of the day is near the
    base.
    """
    phase = math.cos(2 * math.pi * (second / length - 0.58))
    return base + (peak - base) * ((1 + phase) / 2) ** 2


def arrivals(rate: Callable[[float], float], most: float, length: float, seed: int) -> list[float]:
    """Times of a Poisson process of this rate, by thinning; the same for every run of a seed.

    Args:
        rate: Requests a second at a time, at most `most`.
        length: Seconds.
    """
    draw, now = random.Random(seed), 0.0
    found: list[float] = []
    while True:
        now += draw.expovariate(most)
        if now >= length:
            return found
        if draw.random() * most < rate(now):
            found.append(now)


def prompt_of(number: int, length: int, shared: int, seed: int) -> list[int]:
    """Random token numbers; all requests of a seed share the first `shared`, and no two have the
    same rest."""
    common, own = random.Random(seed), random.Random(f"{seed} {number}")
    return [
        *(common.randrange(VOCABULARY) for _ in range(min(shared, length))),
        *(own.randrange(VOCABULARY) for _ in range(length - shared)),
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
    """Send requests when they are due, whether or not those before have been answered, and watch
    their streams.

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

        async def one(number: int) -> Seen:
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
                seen = Seen(
                    due[number],
                    None,
                    time.monotonic() - began,
                    0,
                    None,
                    (None, None),
                    type(error).__name__,
                )
            on_done(seen)
            return seen

        return list(await asyncio.gather(*(one(number) for number in range(len(due)))))


async def _watch(client: Any, body: dict[str, Any], began: float, due: float) -> Seen:
    """One request, event by event."""
    first = last = None
    tokens, setting, error = 0, (None, None), None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return Seen(
                due,
                None,
                time.monotonic() - began,
                0,
                None,
                setting,
                f"HTTP {response.status_code}",
            )
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                error = event["error"]["code"] or event["error"]["type"]
                break
            if any(choice["text"] for choice in event["choices"]):
                last = time.monotonic() - began
                first = last if first is None else first
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
                setting = event["corecontext"]["group_size"], event["corecontext"]["window_size"]
    if error is None and (first is None or not tokens):
        error = "no text"
    between = (
        (last - first) / (tokens - 1)
        if first is not None and last is not None and tokens > 1
        else None
    )
    return Seen(
        due,
        None if first is None else first - due,
        time.monotonic() - began,
        tokens,
        between,
        setting,
        error,
    )
