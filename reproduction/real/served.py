"""Ask a pretrained model behind `vllm serve` for facts in long texts, under vLLM's own attention
and under presets of fetch.

Greedy answers of the HTTP server are counted; in a list, the right records before one are given.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from statistics import fmean
from typing import Any, NamedTuple

import torch

from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.record import append_records, device_name, make_record
from reproduction.real.material import Material
from reproduction.real.tasks import LIST_TOKENS, Question

NAME = "served"
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
CLIENTS = 4
"""Questions asked at once."""
SECONDS = 600.0
"""Longest start of the server, and longest answer."""
PAUSE_S = 1.0
"""Seconds between two looks whether the server answers."""


class Server(NamedTuple):
    """A running server."""

    url: str
    process: int


@contextlib.contextmanager
def served(
    folder: str, options: Sequence[str], environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """Serve a model's folder by `vllm serve` while the block lasts.

    Raises:
        UserError: it did not start; its log is printed.
    """
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*VLLM, "serve", folder, "--served-model-name", NAME, "--port", str(port), *options]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait_for(f"http://127.0.0.1:{port}", process, Path(log.name))
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
            return
        time.sleep(PAUSE_S)
    print(log.read_text(errors="replace"), file=sys.stderr)
    raise UserError(f"vllm serve must start, got exit code {process.returncode}. Its log is above.")


def share_right(url: str, questions: Sequence[Question]) -> float:
    """Return the mean share of the facts of questions that a server's greedy answers give."""

    def share_of(question: Question) -> float:
        return fmean(
            answer_of(url, question.ids[: place.start], place.stop - place.start)
            == question.ids[place]
            for place in question.places
        )

    with ThreadPoolExecutor(CLIENTS) as clients:
        return fmean(clients.map(share_of, questions))


def answer_of(url: str, prompt: list[int], count: int) -> list[int]:
    """Return a server's greedy tokens after a prompt."""
    asked = {"model": NAME, "prompt": prompt, "max_tokens": count, "temperature": 0}
    asked |= {"return_token_ids": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return json.load(response)["choices"][0]["token_ids"]


@dataclass(frozen=True)
class ServedQuestions:
    """The model, the texts, and how many facts are asked for."""

    model: str
    data: str
    output: str
    needles: int
    """Of each length."""
    needle_length: Sequence[int]
    lists: int
    options: Sequence[str]
    """More options of `vllm serve`."""
    seed: int

    def measure(self, methods: Sequence[str]) -> None:
        """Ask a server of each method, and append the records of each as soon as it is measured."""
        material = Material(self.model, self.data, device="cpu")
        questions = {
            ("needles", length): material.needles(length, self.needles, self.seed)
            for length in self.needle_length
            if self.needles
        }
        if self.lists:
            questions["list", LIST_TOKENS] = material.lists(self.lists, self.seed)
        longest = max(len(question.ids) for each in questions.values() for question in each)
        device = device_name("cuda" if torch.cuda.is_available() else "cpu")
        for method in methods:
            options, params = self._attention(method)
            with served(
                material.folder, [*options, "--max-model-len", str(longest), *self.options]
            ) as server:
                for (task, length), asked in questions.items():
                    value = share_right(server.url, asked)
                    print(f"{method}: {task} of {length} tokens: {value:.3f}", file=sys.stderr)
                    given = {"model": material.name, **params, "task": task, "length": length}
                    given |= {"questions": len(asked), "seed": self.seed}
                    given |= {"options": " ".join(self.options)}
                    record = make_record("vllm.accuracy", value, given, device=device)
                    append_records(self.output, [record])

    def _attention(self, method: str) -> tuple[list[str], dict[str, Any]]:
        """Return the options and the params of a method: "full" or a preset of fetch."""
        if method == "full":
            return [], {"method": method}
        config = CCAConfig.preset(method)
        overrides = json.dumps({"cca": config.to_dict()})
        names = ("group_size", "window_size", "sink_size", "fetch_groups", "fetch_index", "store")
        params = {"method": "fetch", "preset": method}
        params |= {name: getattr(config, name) for name in names}
        return ["--attention-backend", "CUSTOM", "--hf-overrides", overrides], params
