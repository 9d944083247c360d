"""The server's promises to its operator: the key, the address, and what its log may hold."""

import asyncio
import hmac
import json
import logging
import time
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from starlette.responses import PlainTextResponse  # noqa: E402

from corecontext.cli import main  # noqa: E402
from corecontext.serve import build, guard, logs  # noqa: E402
from corecontext.serve.guard import Guard  # noqa: E402
from corecontext.serve.settings import Serving  # noqa: E402
from corecontext.serve.text import TextStream  # noqa: E402

KEY = "the-right-key"


def statuses(*headers: dict[str, str]) -> list[int]:
    """Ask a guarded path once with each of these headers."""
    guarded = Guard(
        PlainTextResponse("in"), KEY, SimpleNamespace(draining=False), mock.Mock(), 1000
    )

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [(await client.get("/v1/models", headers=each)).status_code for each in headers]

    return asyncio.run(ask())


@pytest.mark.parametrize("key", ["", "the", KEY[:-1], KEY + "s", KEY + " more", KEY.upper(), "é"])
def test_a_key_that_is_only_like_the_right_one_is_refused(key):
    assert statuses({"Authorization": f"Bearer {key}".encode()}) == [401]


def test_the_right_key_is_taken_under_its_scheme_alone():
    schemes = ("Bearer ", "bearer ", "Basic ", "Token ", "X", "")
    found = statuses(*({"Authorization": scheme + KEY} for scheme in schemes))
    assert found == [200, 200, 401, 401, 401, 401]


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = mock.Mock(side_effect=hmac.compare_digest)
    monkeypatch.setattr(guard.hmac, "compare_digest", compared)
    assert statuses({"Authorization": "Bearer the-wrong"}) == [401]
    compared.assert_called_once_with(b"the-wrong", KEY.encode())


def serving_of_command(monkeypatch, *arguments: str) -> Serving:
    """Return the settings with which the command would serve."""
    served = []
    monkeypatch.setattr(build, "run", lambda serving: served.append(serving) or 0)
    assert main(["serve", *arguments]) == 0
    return served[0]


def test_the_command_takes_the_key_of_the_environment_or_of_a_file(monkeypatch, tmp_path):
    monkeypatch.delenv("CORECONTEXT_API_KEY", raising=False)
    assert serving_of_command(monkeypatch).api_key is None
    monkeypatch.setenv("CORECONTEXT_API_KEY", "of-the-environment")
    assert serving_of_command(monkeypatch).api_key == "of-the-environment"
    file = tmp_path / "key.txt"
    file.write_bytes(b"of-the-file\r\n")
    assert serving_of_command(monkeypatch, "--api-key-file", str(file)).api_key == "of-the-file"


def events_of_start(monkeypatch, serving: Serving) -> list[dict]:
    """Return the log lines of a server's start."""
    events = []
    worker = SimpleNamespace(failed=False)
    app = SimpleNamespace(state=SimpleNamespace(worker=worker))
    monkeypatch.setattr(build, "make_app", lambda serving: app)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: sockets[0].close())
    monkeypatch.setattr(logs, "start_logging", lambda: None)
    monkeypatch.setattr(
        logs, "log_event", lambda event, **fields: events.append({"event": event, **fields})
    )
    assert build.run(serving) == 0
    return events


def test_an_open_address_without_a_key_is_a_warning(monkeypatch):
    def warned(**settings) -> bool:
        events = events_of_start(monkeypatch, Serving(port=0, **settings))
        return any(event.get("level") == "warning" for event in events)

    assert warned(host="0.0.0.0")
    assert not warned(host="0.0.0.0", api_key=KEY)
    assert not warned()


def test_the_default_address_is_the_loopback():
    assert Serving().host == "127.0.0.1"


def test_a_log_record_is_one_line_whatever_it_holds():
    forged = 'x"}\n{"event": "forged"}\r\u2028\x85'
    record = logging.LogRecord("x", logging.INFO, "", 0, forged, (), None)
    record.fields = {"model": forged}
    line = logs.JsonLines().format(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["event"] == json.loads(line)["model"] == forged


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids, **options) -> str:
        return "".join(map(chr, ids))


def test_long_stop_texts_that_the_answer_keeps_beginning_cost_little():
    stream = TextStream(Letters(), ["a" * 999 + letter for letter in "bcdefghijklmnopq"])
    began = time.thread_time()
    text = "".join(stream.push(ord("a")) for _ in range(1200)) + stream.end()
    assert text == "a" * 1200
    assert time.thread_time() - began < 1  # 0.02 s; 5 s where each length is tried


def test_the_beginning_of_a_stop_text_waits_for_its_end():
    stream = TextStream(Letters(), ["abc", "cab"])
    assert [stream.push(ord(letter)) for letter in "xabxab"] == ["x", "", "", "abx", "", ""]
    assert stream.push(ord("c")) == "" and stream.stopped
