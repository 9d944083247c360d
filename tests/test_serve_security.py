"""The server's promises to its operator: the key, the address, and what its log may hold."""

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("fastapi")
httpx, uvicorn = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")

from served import Letters  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402

from corecontext.cli import main  # noqa: E402
from corecontext.config import CCAConfig  # noqa: E402
from corecontext.files import UserError  # noqa: E402
from corecontext.inference.policy import (  # noqa: E402
    SIZE_NAMES,
    Load,
    TablePolicy,
    settings_for,
    table_rows,
)
from corecontext.serve import build, connection, guard, logs  # noqa: E402
from corecontext.serve.ends import Ends  # noqa: E402
from corecontext.serve.guard import Guard  # noqa: E402
from corecontext.serve.http import create_app  # noqa: E402
from corecontext.serve.metrics import Metrics  # noqa: E402
from corecontext.serve.request import Request, Slot  # noqa: E402
from corecontext.serve.settings import Serving  # noqa: E402
from corecontext.serve.text import TextStream  # noqa: E402
from corecontext.serve.worker import Answer  # noqa: E402

KEY = "the-right-key"


def guarded(app, key: str | None = KEY, **options) -> Guard:
    """Put a guard before an application."""
    return Guard(app, key, SimpleNamespace(draining=False), mock.Mock(), 1000, **options)


def statuses(*headers: dict[str, str], path: str = "/v1/models", **options) -> list[int]:
    """Ask a guarded path once with each of these headers."""
    transport = httpx.ASGITransport(guarded(PlainTextResponse("in"), **options))

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [(await client.get(path, headers=each)).status_code for each in headers]

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
    serving = serving_of_command(monkeypatch, "--api-key-file", str(file))
    assert serving.api_key == "of-the-file" and "of-the-file" not in repr(serving)


NO_ENDS = Ends(frozenset(), frozenset(), (), ())


def events_of_start(monkeypatch, serving: Serving, ends=NO_ENDS) -> list[dict]:
    """Return the log lines of a server's start."""
    events = []
    app = SimpleNamespace(state=mock.Mock())
    app.state.worker.alive = app.state.worker.failed = False
    app.state.service.scheduler.policy = TablePolicy(table_rows(16, 512))
    app.state.service.scheduler.admission.config = CCAConfig.pooling(4, 8)
    app.state.service.ends = ends
    monkeypatch.setattr(build, "make_app", lambda serving: app)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: sockets[0].close())
    monkeypatch.setattr(logs, "start_logging", lambda: None)
    monkeypatch.setattr(
        logs, "log_event", lambda event, **fields: events.append({"event": event, **fields})
    )
    assert build.run(serving) == 0
    return events


def test_the_log_says_what_is_served_and_what_ends_answers(monkeypatch):
    listening, endless = events_of_start(monkeypatch, Serving(port=0))
    assert listening["settings"]["group_size"] == 4 and "no token ends" in endless["event"]
    ends = Ends(frozenset([5]), frozenset([5, 6]), (), ("</s>",))
    listening, added = events_of_start(monkeypatch, Serving(port=0, method="full"), ends)
    assert listening["settings"] is None and added["tokens"] == ("</s>",)


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
    assert json.loads(line)["event"] == 'x"}' and json.loads(line)["model"] == forged


def test_lines_of_asyncio_hold_no_text_of_an_error(capsys):
    loggers = [logging.getLogger(name) for name in ("corecontext.serve", "uvicorn.error")]
    loggers.append(logging.getLogger("asyncio"))
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    logs.start_logging()
    try:
        loop = asyncio.new_event_loop()
        future = loop.create_future()
        future.set_result("words of a prompt")
        error = OSError(24, "words of a prompt")
        context = {"message": "socket.accept() out of system resource", "exception": error}
        loop.call_exception_handler({**context, "future": future})
        loop.close()
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "words" not in lines[0]
    assert json.loads(lines[0])["event"] == context["message"]
    assert json.loads(lines[0])["error"] == "OSError"


@pytest.mark.parametrize("stop", ["b\ufffd", "ab\ufffd"])
def test_a_stop_text_in_the_last_characters_is_the_reason_of_the_end(stop):
    """Half a character is text only when no other half comes."""
    half = ord("\ufffd")

    async def answer() -> tuple[str, str]:
        stopped = Answer(Request([1], 3), TextStream(Letters(), [stop]), lambda slot: None)
        stopped.slot = Slot(stopped.request, end_reason="length")
        assert not any(stopped.on_token(token) for token in (ord("a"), ord("b"), half))
        stopped.on_ended(stopped.slot)
        text = "".join([piece async for piece in stopped.pieces()])
        return text, stopped.finish_reason

    assert asyncio.run(answer()) == ("ab\ufffd"[: -len(stop)], "stop")


def test_the_first_line_names_the_sizes_of_the_policy(monkeypatch):
    events = events_of_start(monkeypatch, Serving(port=0, policy="elastic"))
    assert events[0]["sizes"] == [(16, 512), (32, 256), (64, 128)]


def test_the_port_is_taken_before_the_model_is_loaded(monkeypatch):
    made = mock.Mock()
    monkeypatch.setattr(build, "make_app", made)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="^cannot listen on 127.0.0.1 port"):
            build.run(Serving(port=taken.getsockname()[1]))
    made.assert_not_called()


def test_a_thread_that_is_still_in_the_model_ends_with_the_process(monkeypatch):
    """Else the interpreter ends around it, and PyTorch aborts."""
    ended = mock.Mock()
    monkeypatch.setattr(build.os, "_exit", ended)
    events_of_start(monkeypatch, Serving(port=0))
    ended.assert_not_called()
    app = SimpleNamespace(state=mock.MagicMock())
    app.state.worker.alive, app.state.worker.failed = True, False
    monkeypatch.setattr(build, "make_app", lambda serving: app)
    build.run(Serving(port=0))
    ended.assert_called_once_with(0)


# Hosts, headers and bodies


def test_a_browser_reaches_a_server_without_a_key_by_no_name_of_its_own():
    names = ("localhost:80", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "10.0.0.3")
    foreign = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "")
    hosts = [{"Host": name} for name in (*names, *foreign)]
    for path in ("/v1/models", "/metrics"):
        found = statuses(*hosts, path=path, key=None, local=True)
        assert found == [200] * len(names) + [403] * len(foreign)
    assert statuses(*hosts, key=None) == [200] * len(hosts)


def test_a_refusal_shows_little_of_a_header_and_names_the_scheme_of_the_key():
    local = guarded(None, None, local=True)
    shown = json.loads(local._refuse_anywhere({b"host": b"\xe9" + b"x" * 200}).body)
    assert f"got '\\xe9{'x' * 99}'. Send that" in shown["error"]["message"]
    assert guarded(None)._refuse_api({}, "GET").headers["www-authenticate"] == "Bearer"


def test_only_servers_without_a_key_on_the_loopback_look_at_the_host():
    for settings, local in (
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"api_key": KEY}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": ""}, False),  # Ray's
    ):
        app = create_app(mock.MagicMock(max_length=10), mock.MagicMock(), Serving(**settings))
        assert app.user_middleware[0].kwargs["local"] == local


def test_a_body_has_one_length():
    both = {"Content-Length": "3", "Transfer-Encoding": "chunked", "Authorization": f"Bearer {KEY}"}
    for path in ("/v1/models", "/health"):
        assert statuses(both, path=path) == [400]


def test_no_path_leads_to_the_host_of_a_header():
    app = create_app(mock.MagicMock(max_length=10), mock.MagicMock(), Serving(api_key=KEY))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
            return await client.get("/metrics/")

    assert asyncio.run(ask()).status_code == 404


def test_a_body_that_does_not_end_is_refused_in_time(monkeypatch):
    monkeypatch.setattr(guard, "BODY_S", 0.05)
    reached = []

    async def app(scope, receive, send):
        reached.append((await receive())["type"])
        reached.append((await receive())["type"])
        await PlainTextResponse("late", 400)(scope, receive, send)

    async def parts():
        yield b"abc"
        await asyncio.Event().wait()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(guarded(app, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await asyncio.wait_for(client.post("/v1/completions", content=parts()), 5)

    response = asyncio.run(ask())
    assert response.status_code == 408 and response.headers["connection"] == "close"
    assert response.json()["error"]["code"] == "timeout"
    assert reached == ["http.request", "http.disconnect"]


@contextlib.asynccontextmanager
async def connections(app):
    """Serve an application on a free port of the loopback; yield a function that connects."""
    config = uvicorn.Config(app, http=connection.Connection, log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: connection.Connection(config, state, {}), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    try:
        yield lambda: asyncio.open_connection("127.0.0.1", port)
    finally:
        server.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc",
    ],
    ids=["nothing", "half of the headers", "half of the second request", "half of the body"],
)
def test_a_request_that_does_not_arrive_is_closed_in_time(monkeypatch, sent):
    for name in ("HEADERS_S", "BODY_S", "LATER_S"):
        monkeypatch.setattr(connection, name, 0.05)

    async def talk() -> None:
        async with connections(PlainTextResponse("hello")) as connect:
            reader, writer = await connect()
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 2)  # uvicorn closes idle ones after 5 s
            writer.close()

    asyncio.run(talk())


def test_a_request_that_drips_in_has_one_deadline(monkeypatch):
    monkeypatch.setattr(connection, "HEADERS_S", 0.1)

    async def talk() -> bool:
        async with connections(PlainTextResponse("hello")) as connect:
            reader, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nHost: ")
            closed = asyncio.ensure_future(reader.read())
            for _ in range(40):
                if not closed.done():
                    writer.write(b"x")
                    await asyncio.sleep(0.01)
            in_time = closed.done()
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await closed
            return in_time

    assert asyncio.run(talk())


def test_slow_answers_outlive_the_deadlines_of_requests(monkeypatch):
    for name in ("HEADERS_S", "BODY_S", "LATER_S"):
        monkeypatch.setattr(connection, name, 0.02)

    async def app(scope, receive, send):
        await asyncio.sleep(0.1)
        await PlainTextResponse("hello")(scope, receive, send)

    async def talk() -> bytes:
        async with connections(app) as connect:
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.0\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
            answer = await asyncio.wait_for(reader.read(), 2)
            writer.close()
            return answer

    assert asyncio.run(talk()).endswith(b"hello")


def test_connections_beyond_the_limit_are_closed(monkeypatch):
    monkeypatch.setattr(connection, "MOST_CONNECTIONS", 2)

    async def ask(connect) -> bytes:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = await asyncio.wait_for(reader.read(), 2)
        writer.close()
        return answer

    async def talk() -> list[bytes]:
        async with connections(PlainTextResponse("hello")) as connect:
            idle = [await connect() for _ in range(2)]
            answers = [await ask(connect)]
            idle[0][1].transport.abort()
            while not answers[-1]:  # as soon as the server has seen it leave
                answers.append(await ask(connect))
            idle[1][1].close()
            return answers

    answers = asyncio.run(asyncio.wait_for(talk(), 5))
    assert answers[0] == b"" and answers[-1].endswith(b"hello")
    # asyncio accepts several backlogs before the first connection is counted.
    assert connection.descriptor_limit() > connection.MOST_CONNECTIONS
    assert connection.descriptor_limit() >= connection.BACKLOG * 4


# Metrics


def test_answers_that_are_errors_are_counted_from_400_on():
    for status, count in ((200, 0), (399, 0), (400, 1), (500, 1)):
        app = guarded(PlainTextResponse("", status), None)

        async def ask(app: Guard = app) -> None:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                await client.get("/v1/models")
                await client.get("/health")

        asyncio.run(ask())
        refused = app.metrics.refused.labels
        assert refused.call_args_list == [mock.call(str(status))] * count


def test_clients_do_not_make_metrics_without_limit():
    own = CCAConfig.paper(group_size=8, window_size=32)

    def series(own: CCAConfig, *requests: Request, policy=None) -> set[tuple[str, ...]]:
        scheduler = mock.MagicMock(policy=policy)
        scheduler.admission.config = own
        metrics = Metrics(scheduler)
        for request in requests:
            sizes = (request.group_size, request.window_size)
            rest = (len(request.prompt), policy, Load(), request.fetch_groups)
            config = settings_for(own, *sizes, *rest)
            metrics.ended(Slot(request, config=config, end_reason="stop"), 0.0)
        return {
            tuple(sample.labels[name] for name in SIZE_NAMES)
            for metric in metrics.settings.collect()
            for sample in metric.samples
        }

    chosen = [Request([1], 1, group_size=g, window_size=s) for g in (2, 3) for s in (40, 50)]
    chosen += [Request([1], 1, window_size=60), Request([1], 1, group_size=4)]
    plain = Request([1] * 99, 1)
    other = ("other",) * 3
    assert series(own, plain, *chosen) == {("8", "32", "0"), other}
    assert series(own, plain, policy=TablePolicy(table_rows(16, 512))) == {("16", "512", "0")}
    fetches = own.replace(fetch_groups=9)
    chosen = [Request([1], 1, fetch_groups=k) for k in range(9)]
    assert series(fetches, plain, *chosen) == {("8", "32", "9"), other}
    lengths = [Request([1] * length, 1) for length in (100, 300, 900)]
    by_length = CCAConfig.paper(window_size=32, num_groups=4)
    assert series(by_length, *lengths) == {other}


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
