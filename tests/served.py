"""A server in a process of its own, or an application without a network: for tests and for the
programs that fuzz and soak it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
KEY = "a-key-of-the-test"


class Served:
    """`corecontext serve` on a free port of this machine's CPU.

    Args:
        log: File for what it writes.
        options: Of the command.
        gpus: It sees this machine's GPUs.
    """

    def __init__(self, log: Path, *options: str, gpus: bool = False) -> None:
        self.log = log
        env = {
            **os.environ,
            "CORECONTEXT_API_KEY": KEY,
            "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path[1:])),
        }
        env |= {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "corecontext", "serve", "--port", "0", *options],
                stderr=out,
                stdout=out,
                env=env,
            )
        try:
            self.url = self.wait()
        except BaseException:
            self.kill()
            raise

    def wait(self) -> str:
        """Wait until it listens; return its address."""
        deadline = time.monotonic() + 250
        while not (found := [line for line in self.lines() if line["event"] == "listening"]):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return f"http://127.0.0.1:{found[0]['port']}"

    def lines(self) -> list[dict]:
        """What it has logged; a line that is only half written is left out."""
        return [
            json.loads(line)
            for line in self.log.read_text().splitlines()
            if line.startswith("{") and line.endswith("}")
        ]

    def gauge(self, name: str) -> float:
        """The sum of all metrics whose names and labels begin so."""
        page = httpx.get(self.url + "/metrics", timeout=30).text
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name)
        )

    def resident_mib(self) -> float:
        """Resident memory of the server (Linux)."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


class Asgi:
    """The application without a network; its worker's thread runs only where asked."""

    def __init__(
        self,
        model: str,
        *,
        start: bool = True,
        api_key: str | None = None,
        time_limit_s: float = 60.0,
        page: bool = True,
        **settings,
    ) -> None:
        from corecontext.loading import load
        from corecontext.serve.http import create_app
        from corecontext.serve.scheduler import Scheduler
        from corecontext.serve.settings import Serving

        self.loaded = load(model, preset="pooling", group_size=8, window_size=32, device="cpu")
        self.scheduler = Scheduler(self.loaded.model, **settings)
        serving = Serving(name="tiny", api_key=api_key, time_limit_s=time_limit_s, page=page)
        self.app = create_app(self.scheduler, self.loaded.tokenizer, serving)
        self.worker = self.app.state.worker
        if start:
            self.worker.start()

    def ask(self, *requests: tuple) -> list:
        """Send requests at once: (method, path, options of httpx); returns the responses."""

        async def send() -> list:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await asyncio.gather(
                    *(client.request(method, path, **options) for method, path, options in requests)
                )

        return asyncio.run(send())

    def complete(self, **body):
        return self.ask(
            ("POST", "/v1/completions", {"json": {"model": "tiny", "prompt": "abc", **body}})
        )[0]


class Letters:
    """A tokenizer whose tokens are characters; token 3 is special."""

    chat_template = None
    eos_token_id = None

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}

    def convert_ids_to_tokens(self, token):
        return chr(token)

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        text = "".join(chr(i) for i in ids if not (skip_special_tokens and i == 3))
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text
