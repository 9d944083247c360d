"""Mixed traffic on a server for as long as asked: no 500, right answers, and nothing left behind.

    python tests/soak_serve.py --minutes 120

Clients ask for completions and chats, streamed or not, with shared and own beginnings, many g and
s, sampled and greedy; some leave in the middle, some send nonsense. Every greedy answer must be the
one that the same question got first.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
from served import KEY, ROOT, Served

TEXT = (ROOT / "corecontext/assets/document.txt").read_text(encoding="utf-8")
NAME = "corecontext-demo"
ALLOCATED = 'corecontext_cache_bytes{what="allocated"}'
WRONG = (
    {"prompt": 5},
    {"prompt": ""},
    {"max_tokens": 0},
    {"model": "other"},
    {"tools": []},
    {"prompt": "x" * 70000},
)


class Client(threading.Thread):
    """One user after another."""

    def __init__(
        self, server: Served, seed: int, end: float, known: dict[str, str], seen: Counter
    ) -> None:
        super().__init__(daemon=True)
        self.server, self.draw, self.end, self.known, self.seen = (
            server,
            random.Random(seed),
            end,
            known,
            seen,
        )
        self.problem: str | None = None

    def run(self) -> None:
        with httpx.Client(
            base_url=self.server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=600
        ) as client:
            while time.monotonic() < self.end and self.problem is None:
                try:
                    self.one(client)
                except Exception as error:
                    self.problem = f"{type(error).__name__}: {error}"

    def one(self, client: httpx.Client) -> None:
        """One request of a random kind."""
        draw = self.draw
        kind = draw.choices(("whole", "stream", "leave", "wrong"), (5, 5, 2, 1))[0]
        start = draw.choice((0, 0, 7000, draw.randrange(30000)))
        body = {
            "model": NAME,
            "max_tokens": draw.choice((1, 8, 30, 90)),
            "temperature": draw.choice((0, 0, 0.8)),
            "stream": kind in ("stream", "leave"),
            "ignore_eos": draw.random() < 0.5,
        }
        if draw.random() < 0.5:
            body |= draw.choice(
                (
                    {"group_size": 8, "window_size": 128},
                    {"group_size": 32, "window_size": 300},
                    {"window_size": 64},
                )
            )
        if draw.random() < 0.3:
            body["stop"] = draw.choice(("the", [". ", "\n"]))
        text = TEXT[start : start + draw.choice((5, 200, 900, 3000))]
        chat = draw.random() < 0.3
        if chat:
            body["messages"] = [
                {"role": "system", "content": TEXT[:600]},
                {"role": "user", "content": text},
            ]
        else:
            body["prompt"] = text
        path = "/v1/chat/completions" if chat else "/v1/completions"
        if kind == "wrong":
            response = client.post(
                "/v1/completions", json={"model": NAME, "prompt": "a", **draw.choice(WRONG)}
            )
            assert response.status_code in (400, 404), response.text[:200]
        elif kind == "leave":
            with client.stream("POST", path, json={**body, "max_tokens": 3000}) as response:
                assert response.status_code == 200
                for count, _ in enumerate(response.iter_lines()):
                    if count > 6:
                        break
        else:
            self.check(body, self.ask(client, path, body, chat))
        self.seen[kind] += 1

    def ask(self, client: httpx.Client, path: str, body: dict, chat: bool) -> str:
        """The text of an answer."""
        if not body["stream"]:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text[:200]
            choice = response.json()["choices"][0]
            return choice["message"]["content"] if chat else choice["text"]
        pieces = []
        with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    choice = event["choices"][0]
                    pieces.append(choice["delta"].get("content", "") if chat else choice["text"])
        assert line == "data: [DONE]" or not line
        return "".join(pieces)

    def check(self, body: dict, text: str) -> None:
        """A greedy question has one answer, however many run beside it."""
        if body["temperature"] == 0:
            question = json.dumps({**body, "stream": None}, sort_keys=True)
            assert self.known.setdefault(question, text) == text, "a greedy answer changed"


def main() -> int:
    """Run; 0 where all is well."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Served(
            Path(folder) / "log",
            "--policy",
            "fixed",
            "--preset",
            "pooling",
            "--window-size",
            "256",
            "--cache-mib",
            "600",
            "--max-running",
            "8",
        )
        try:
            return soak(server, options)
        finally:
            server.kill()


def soak(server: Served, options: argparse.Namespace) -> int:
    """The traffic, then the look at what is left."""
    began, seen, known, resident = time.monotonic(), Counter(), {}, []
    end = began + 60 * options.minutes
    clients = [
        Client(server, options.seed * 1000 + number, end, known, seen)
        for number in range(options.clients)
    ]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        time.sleep(min(30, max(1, end - time.monotonic())))
        resident.append(server.resident_mib())
        running, held = server.gauge("corecontext_running"), server.gauge(ALLOCATED)
        print(
            f"{time.monotonic() - began:.0f} s: {dict(seen)}, {resident[-1]:.0f} MiB, running "
            f"{running:.0f}, cache "
            f"{held / 2**20:.0f} MiB",
            flush=True,
        )
    problems = [client.problem for client in clients if client.problem]
    deadline = time.monotonic() + 10
    while server.gauge("corecontext_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    left = {
        name: server.gauge(name)
        for name in (
            "corecontext_running",
            "corecontext_queue_length",
            'corecontext_cache_bytes{what="used"}',
        )
    }
    prefixes, held = (
        server.gauge('corecontext_cache_bytes{what="prefixes"}'),
        server.gauge(ALLOCATED),
    )
    errors = server.gauge('corecontext_requests_total{outcome="error"}') + server.gauge(
        'corecontext_refused_total{status="5'
    )
    middle, last = resident[len(resident) // 2], resident[-1]
    print(
        f"left: {left}; prefixes {prefixes / 2**20:.0f} MiB, allocated {held / 2**20:.0f} MiB; "
        "errors "
        f"{errors:.0f}; greedy questions {len(known)}; resident {resident[0]:.0f}, half way "
        f"{middle:.0f}, end "
        f"{last:.0f} MiB"
    )
    if any(left.values()) or held != prefixes:
        problems.append("something was left behind")
    if errors:
        problems.append("requests failed inside the server")
    if last > 1.15 * middle + 50:
        problems.append("memory grew")
    print("\n".join(problems) or f"well: {sum(seen.values())} requests")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
