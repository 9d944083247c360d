"""The server as clients meet it: the official client, many at once, those that leave, every
refusal, and SIGTERM."""

import asyncio
import json
import signal
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from served import Asgi
from tiny_model import save_tiny_model
from tokenizers import processors

pytest.importorskip("fastapi")
httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")

from pydantic import ValidationError  # noqa: E402

from corecontext.cli import main  # noqa: E402
from corecontext.data.chat import chat_prompt  # noqa: E402
from corecontext.inference import Engine, Load  # noqa: E402
from corecontext.inference.policy import TablePolicy, load_policy, table_rows  # noqa: E402
from corecontext.inference.sampling import InvalidLogits  # noqa: E402
from corecontext.loading import load  # noqa: E402
from corecontext.serve.errors import Code, RequestError  # noqa: E402
from corecontext.serve.guard import Guard  # noqa: E402
from corecontext.serve.protocol import ChatRequest, CompletionRequest  # noqa: E402
from corecontext.serve.request import Request, Slot  # noqa: E402
from corecontext.serve.settings import BUNDLED, Serving  # noqa: E402
from corecontext.serve.text import TextStream  # noqa: E402
from corecontext.serve.worker import Answer, _failure  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
KEY, NAME = "a-key-of-the-test", "corecontext-demo"
DOCUMENT = (ROOT / "corecontext/assets/document.txt").read_text(encoding="utf-8")
needs_assets = pytest.mark.skipif(
    not (BUNDLED / "config.json").is_file(), reason="the bundled model is not here"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from served import Served

    served = Served(
        tmp_path_factory.mktemp("serve") / "log",
        "--policy",
        "fixed",
        "--preset",
        "pooling",
        "--window-size",
        "256",
        "--chunk-size",
        "128",
        "--cache-mib",
        "1500",
    )
    served.client = openai.OpenAI(
        base_url=served.url + "/v1",
        api_key=KEY,
        max_retries=0,
        timeout=60,
        # A busy machine may use an idle connection in the moment in which the server closes it.
        default_headers={"Connection": "close"},
    )
    yield served
    served.kill()


def prompts(count: int) -> list[str]:
    return [DOCUMENT[500 * i : 500 * i + 60 + 47 * (i % 9)] for i in range(count)]


@needs_assets
def test_the_official_client(server):
    client = server.client
    card = client.models.list().data[0]
    assert card.id == NAME == client.models.retrieve(NAME).id and card.max_model_len == 65536
    asked = {"model": NAME, "prompt": DOCUMENT[:700], "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage.prompt_tokens == 700 and whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length" and len(whole.choices[0].text) == 12
    sizes = {"group_size": 16, "window_size": 256, "fetch_groups": 0}
    assert whole.corecontext == sizes
    pieces = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert (
        "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    )
    assert pieces[-1].usage.total_tokens == 712 and pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens == 640  # five chunks of 128
    assert pieces[0].corecontext == sizes and len(pieces) > 10
    own = client.completions.create(**asked, extra_body={"group_size": 4, "window_size": 40})
    assert own.corecontext == {"group_size": 4, "window_size": 40, "fetch_groups": 0}
    numbers = client.completions.create(**{**asked, "prompt": list(DOCUMENT[:700].encode())})
    assert numbers.choices[0].text == whole.choices[0].text

    chat = {
        "model": NAME,
        "messages": [
            {"role": "system", "content": DOCUMENT[:300]},
            {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
        ],
        "max_completion_tokens": 10,
        "temperature": 0,
    }
    answer = client.chat.completions.create(**chat)
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content) == 10
    pieces = list(client.chat.completions.create(**chat, stream=True))
    assert (
        "".join(p.choices[0].delta.content or "" for p in pieces)
        == answer.choices[0].message.content
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == "length"

    text = whole.choices[0].text
    for stop in (text[3:6], [text[5:8], "no such text"]):
        first = stop if isinstance(stop, str) else stop[0]
        stopped = client.completions.create(**asked, stop=stop).choices[0]
        assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(first)]
    sampled = [
        client.completions.create(**{**asked, "temperature": 1.0, "top_p": 0.95}, seed=seed)
        .choices[0]
        .text
        for seed in (3, 3, 4)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@needs_assets
def test_16_at_once_get_the_tokens_that_each_gets_alone(server):
    loaded, texts = load(str(BUNDLED), window_size=256, device="cpu"), prompts(16)
    engine, expected = Engine(loaded.model, chunk_size=128), []
    for text in texts:
        made = engine.generate(
            loaded.tokenizer(text, return_tensors="pt")["input_ids"],
            max_new_tokens=5,
            eos_token_id=[],
        )[0]
        expected.append(loaded.tokenizer.decode(made, skip_special_tokens=True))

    def ask(text: str, stream: bool) -> str:
        answer = server.client.completions.create(
            model=NAME,
            prompt=text,
            max_tokens=5,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        return (
            "".join(piece.choices[0].text for piece in answer) if stream else answer.choices[0].text
        )

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(ask, texts, [i % 2 == 0 for i in range(16)]))
    assert found == expected
    assert (
        server.gauge("corecontext_running")
        == server.gauge('corecontext_cache_bytes{what="used"}')
        == 0
    )


@needs_assets
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(server, stream):
    body = {
        "model": NAME,
        "prompt": DOCUMENT[:50],
        "max_tokens": 30000,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    if stream:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=body, headers=headers, timeout=30
        ) as response:
            lines = response.iter_lines()  # kept: its end closes the connection
            next(lines)
            assert server.gauge("corecontext_running") == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=0.5)
    left = time.monotonic()
    while server.gauge("corecontext_running"):
        assert time.monotonic() - left < 60, "the slot was not freed"
        time.sleep(0.02)
    assert server.gauge('corecontext_cache_bytes{what="used"}') == 0
    assert [line["outcome"] for line in server.lines() if line["event"] == "request"][
        -1
    ] == "cancelled"


@needs_assets
def test_logs_and_metrics_say_what_happened_without_the_text(server):
    lines = [line for line in server.lines() if line["event"] == "request"]
    if not lines:
        pytest.skip("needs the tests above")
    assert {
        "outcome",
        "prompt_tokens",
        "completion_tokens",
        "group_size",
        "first_token_s",
        "total_s",
    } <= set(lines[0])
    assert not any(DOCUMENT[i : i + 12] in server.log.read_text() for i in range(0, 600, 12))
    assert server.gauge("corecontext_requests_total") == len(lines)
    assert server.gauge('corecontext_tokens_total{kind="made"}') == sum(
        line["completion_tokens"] for line in lines
    )
    assert server.gauge("corecontext_time_to_first_token_seconds_count") > 0
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/ready").json() == {"status": "ready"}


@needs_assets
def test_sigterm_under_load_loses_no_accepted_request(server):
    """The last test on this server: it ends it."""
    begun, answers = threading.Barrier(9, timeout=200), {}

    def ask(number: int) -> None:
        stream = server.client.completions.create(
            model=NAME,
            prompt=DOCUMENT[: 40 * (number + 1)],
            max_tokens=100,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = [next(stream).choices[0]]
        begun.wait()
        pieces += [piece.choices[0] for piece in stream]
        answers[number] = (len("".join(piece.text for piece in pieces)), pieces[-1].finish_reason)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    server.process.send_signal(signal.SIGTERM)
    while httpx.get(server.url + "/ready").status_code != 503:
        time.sleep(0.01)
    with pytest.raises(openai.InternalServerError) as refused:
        server.client.completions.create(model=NAME, prompt="late", max_tokens=1)
    assert refused.value.status_code == 503 and refused.value.code == "draining"
    for thread in threads:
        thread.join()
    assert answers == dict.fromkeys(range(8), (100, "length"))
    assert server.process.wait(20) == 0
    assert [line["event"] for line in server.lines()][-1] == "stopped"


# In this process, on a tiny model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_length=512)


@pytest.fixture(scope="module")
def tiny(folder):
    served = Asgi(folder)
    yield served
    served.worker.stop()


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"model": ', "the body must be JSON"),
        (b"\xff\xfe", ""),
        (b"", ""),
        (b"[]", "the body must be a JSON object. Send"),
        (b"[" * 5000, ""),
        (b'"a"', "the body must be a JSON object. Send"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', ".*unpaired"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature is not valid"),
    ],
    ids=repr,
)
def test_malformed_bodies(tiny, body, message):
    response = tiny.ask(
        (
            "POST",
            "/v1/completions",
            {"content": body, "headers": {"content-type": "application/json"}},
        )
    )[0]
    assert response.status_code == 400
    assert message.strip(".*") in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "status, body, message",
    [
        (404, {"model": "gpt-5"}, "model 'gpt-5' is not served here. Use 'tiny'."),
        (400, {"prompt": ["a", ""]}, "prompt must have at least one token, got an empty one."),
        (400, {"prompt": [1, 300]}, "prompt must hold token numbers below 256, got 300."),
        (400, {"max_tokens": 0}, "max_tokens must be at least 1 without echo, got 0."),
        (400, {"max_tokens": 510}, "prompt and answer must fit 512"),
        pytest.param(
            *(400, {"prompt": "a " * 5000}, "prompt and answer must fit 512 tokens, got a prompt"),
            id="a prompt that is far too long",
        ),
        (
            400,
            {"prompt": "abcdefgh" * 70},
            "prompt and answer must fit 512 tokens, got 560 and 16. Shorten",
        ),
        (400, {"tools": [1]}, "field 'tools' is not supported. Leave it out."),
    ],
    ids=str,
)
def test_wrong_requests(tiny, status, body, message):
    response = tiny.complete(**body)
    error = response.json()["error"]
    assert response.status_code == status and error["message"].startswith(message), error
    code = "model_not_found" if status == 404 else None
    if message.startswith("prompt and answer must fit"):
        code = "context_length_exceeded"
    assert error["type"] == "invalid_request_error" and error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


MANY = 120_000
HUGE = {
    "tokens": {"prompt": [-1] * MANY},
    "lists of tokens": {"prompt": [[-1] * MANY]},
    "texts": {"prompt": ["\ud800"] * (MANY // 2)},
    "lists": {"prompt": [[]] * MANY},
    "stops": {"stop": [5] * MANY},
    "biases": {"logit_bias": {str(i): "x" for i in range(MANY // 2)}},
    "fields": {f"f{i}": 1 for i in range(MANY // 2)},
    "options": {"stream_options": {f"f{i}": 1 for i in range(MANY // 2)}},
    "messages": {"messages": [{}] * MANY},
    "parts": {"messages": [{"role": "user", "content": [{}] * MANY}]},
    "short messages": {"messages": [{"role": "user", "content": ""}] * 25_000},
}


@pytest.mark.parametrize("body", HUGE.values(), ids=HUGE)
def test_a_large_invalid_body_makes_few_errors_and_is_answered_soon(tiny, body):
    """An error for each element would hold up the event loop, and all clients, for seconds."""
    kind, path, whole = CompletionRequest, "/v1/completions", {"prompt": "abc"}
    if "messages" in body:
        kind, path, whole = ChatRequest, "/v1/chat/completions", {}
    whole |= {"model": "tiny", **body}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(whole)
    assert refused.value.error_count() <= 4
    content = json.dumps(whole)
    assert len(content) > 300_000
    began = time.process_time()
    headers = {"content-type": "application/json"}
    response = tiny.ask(("POST", path, {"content": content, "headers": headers}))[0]
    assert time.process_time() - began < 5  # about 0.1
    assert response.status_code == 400 and len(response.content) < 1000


def test_the_key_is_asked_for_and_large_bodies_are_not_read(folder):
    served = Asgi(folder, start=False, api_key="right")
    key = {"Authorization": "Bearer right"}
    found = served.ask(
        *(
            ("GET", "/v1/models", {"headers": headers})
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "right"},
                {"Authorization": "Bearer"},
                key,
            )
        ),
        ("GET", "/health", {}),
        ("GET", "/metrics", {}),
    )
    assert [response.status_code for response in found] == [401, 401, 401, 401, 200, 503, 200]
    assert "Bearer KEY" in found[0].json()["error"]["message"]
    assert found[0].headers["www-authenticate"] == "Bearer"
    large = b"x" * (2**20 + 32 * 512 + 1)

    async def parts():
        for start in range(0, len(large), 100000):
            yield large[start : start + 100000]

    for content in (large, parts()):
        response = served.ask(("POST", "/v1/completions", {"content": content, "headers": key}))[0]
        assert response.status_code == 413 and "at most" in response.json()["error"]["message"]
    page = served.ask(("GET", "/metrics", {}))[0].text
    assert 'corecontext_refused_total{status="401"} 4.0' in page
    assert 'refused_total{status="413"} 2.0' in page
    assert 'refused_total{status="503"}' not in page  # the probe's


def test_a_body_that_grows_too_large_runs_nothing(tiny, monkeypatch):
    """The beginning of the body is a whole request."""
    taken = []

    def submit(request, *callbacks):
        taken.append(request)
        raise RequestError(Code.QUEUE_FULL, "none is taken")

    monkeypatch.setattr(tiny.scheduler, "submit", submit)

    async def parts():
        yield b'{"model": "tiny", "prompt": "abc", "max_tokens": 9, "stream": true}'
        for _ in range(12):
            yield b" " * 100000

    response = tiny.ask(
        (
            "POST",
            "/v1/completions",
            {"content": parts(), "headers": {"content-type": "application/json"}},
        )
    )[0]
    assert response.status_code == 413 and not taken


def test_a_client_that_leaves_a_body_that_is_too_large_is_seen_to_leave():
    """Otherwise whoever waits for its leaving would be told of parts for ever, and nothing else
    would run."""
    told = []

    async def receive():
        return {"type": "http.request", "body": b"12345", "more_body": True}

    async def app(scope, receive, send):
        told.extend([await receive(), await receive()])

    async def send(message):
        pass

    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    guard = Guard(
        app,
        None,
        SimpleNamespace(draining=False),
        mock.Mock(),
        4,
    )
    asyncio.run(guard(scope, receive, send))
    assert [message["type"] for message in told] == ["http.disconnect"] * 2


def test_the_key_is_asked_for_behind_a_prefix_of_paths(folder):
    served = Asgi(folder, start=False, api_key="right")

    async def send() -> list:
        transport = httpx.ASGITransport(served.app, root_path="/llm")
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost/llm"
        ) as client:
            return [
                (await client.get("/v1/models", headers=headers)).status_code
                for headers in ({}, {"Authorization": "Bearer right"})
            ]

    assert asyncio.run(send()) == [401, 200]


def test_an_answer_can_be_sent_back_in_the_next_chat(tiny):
    async def talk() -> None:
        transport = httpx.ASGITransport(tiny.app)
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
            )
            turns = [{"role": "user", "content": "hi"}]
            said = (
                (await client.chat.completions.create(model="tiny", messages=turns, max_tokens=3))
                .choices[0]
                .message
            )
            for form in (said, said.model_dump()):
                again = [*turns, form, {"role": "user", "content": "and"}]
                await client.chat.completions.create(model="tiny", messages=again, max_tokens=3)

    asyncio.run(talk())


def test_templates_write_special_tokens_themselves(folder):
    served, prompts = Asgi(folder), []
    tokenizer, submit = served.loaded.tokenizer, served.scheduler.submit
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="Q $A", special_tokens=[("Q", tokenizer.convert_tokens_to_ids("Q"))]
    )
    served.scheduler.submit = lambda request, *callbacks: (
        prompts.append(tokenizer.decode(request.prompt)) or submit(request, *callbacks)
    )
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    served.ask(("POST", "/v1/chat/completions", {"json": chat}))
    tokenizer.bos_token, tokenizer.chat_template = "Q", "{{ bos_token }}<{{ messages[0].content }}>"
    served.ask(("POST", "/v1/chat/completions", {"json": chat}))
    served.complete(max_tokens=2)
    served.worker.stop()
    assert prompts == ["Quser: hi\nassistant:", "Q<hi>", "Qabc"]


def test_tokens_that_only_the_tokenizer_knows_are_refused(folder):
    served = Asgi(folder, start=False)
    served.loaded.tokenizer.add_tokens(["<pad>"])
    response = served.complete(prompt="abc<pad>")
    assert response.status_code == 400
    assert (
        response.json()["error"]["message"] == "prompt must hold token numbers below 256, got 256."
    )


def test_an_event_is_one_line_for_every_client(tiny, monkeypatch):
    monkeypatch.setattr(TextStream, "push", lambda self, token: "a\u2028b\x85c")
    lines = tiny.complete(max_tokens=2, stream=True).text.splitlines()
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == "a\u2028b\x85c" * 2


def test_what_is_stopped_is_not_called_late(folder):
    served = Asgi(folder)
    step = served.scheduler.run_turn
    turns = []

    def run_turn() -> bool:
        turns.append(step())
        if turns[-1] and sum(turns) == 5:
            threading.Thread(target=served.worker.stop).start()
        time.sleep(0.01)
        return turns[-1]

    served.scheduler.run_turn = run_turn
    response = served.complete(max_tokens=400)
    assert response.status_code == 503
    assert "the server was stopped before" in response.json()["error"]["message"]


def test_a_full_queue_and_a_closed_door(folder):
    served = Asgi(folder, queue_limit=2, max_rows=1)
    original, gate = served.scheduler.run_turn, threading.Event()
    served.scheduler.run_turn = lambda: gate.wait() and original()

    async def send() -> list:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
            tasks = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(5)
            ]
            while sum(task.done() for task in tasks) < 3:
                await asyncio.sleep(0.01)
            gate.set()
            return [(await task).status_code for task in tasks]

    assert sorted(asyncio.run(send())) == [200, 200, 429, 429, 429]
    served.worker.stop()
    response = served.complete()
    assert response.status_code == 503 and response.json()["error"]["code"] == "draining"
    assert [r.status_code for r in served.ask(("GET", "/ready", {}), ("GET", "/health", {}))] == [
        503,
        503,
    ]


def test_an_answer_follows_the_code_of_an_error_and_not_its_words(folder, monkeypatch):
    """Messages full of the words that other errors have."""
    served = Asgi(folder)
    words = "must fit, is not served, memory, queue, shutting down, time limit"
    for code in Code:
        error = RequestError(code, words, "prompt")
        monkeypatch.setattr(served.worker, "submit", mock.Mock(side_effect=error))
        response = served.complete()
        assert response.status_code == code.status
        assert response.json()["error"] == {
            "message": words,
            "type": code.kind,
            "param": "prompt",
            "code": code.protocol_code,
        }
    monkeypatch.setattr(served.worker, "submit", mock.Mock(side_effect=ValueError(words)))
    response = served.complete()
    assert response.status_code == 400 and response.json()["error"]["code"] is None
    served.worker.stop()


def test_the_time_limit_and_errors_inside(folder, monkeypatch):
    served = Asgi(folder, time_limit_s=0.5)
    original = served.scheduler.run_turn
    served.scheduler.run_turn = lambda: time.sleep(0.02) or original()
    response = served.complete(max_tokens=400)
    assert response.status_code == 408
    assert "took longer than its time limit" in response.json()["error"]["message"]
    events = [
        line for line in served.complete(max_tokens=400, stream=True).text.splitlines() if line
    ]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    assert len(events) > 1
    for error, status, code in (
        (torch.OutOfMemoryError("no"), 503, "error"),
        (RuntimeError("broken: abc, of memory"), 500, "internal_error"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."),
            503,
            "error",
        ),
    ):

        def failing(*args, error=error, **kwargs):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(served.loaded.model.model, "forward", failing)
            response = served.complete()
        assert response.status_code == status and "abc" not in response.text
        assert response.json()["error"]["code"] == code
    assert served.complete(max_tokens=2).status_code == 200 and served.scheduler.idle
    assert served.scheduler.memory.used == 0
    served.worker.stop()


# Text


def test_chats_without_a_template_are_lines(tiny, monkeypatch):
    tokenizer = tiny.loaded.tokenizer
    turns = [("system", "Be short."), ("user", "Hi")]
    assert chat_prompt(tokenizer, turns) == "system: Be short.\nuser: Hi\nassistant:"
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if messages[0].role == 'user' %}{{ raise_exception('no') }}"
        "{% endif %}",
    )
    assert chat_prompt(tokenizer, turns) == "<system>Be short.<user>Hi"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    error = tiny.ask(("POST", "/v1/chat/completions", {"json": body}))[0].json()["error"]
    message = "messages must suit the model's chat template, which refuses them: no"
    assert error["message"].startswith(message) and error["param"] == "messages"


# Settings


def test_an_answer_whose_last_text_fails_ends():
    class Broken:
        stopped = False

        def end(self):
            raise ValueError("no such token")

    ended = []

    async def read():
        answer = Answer(Request([1], 1), Broken(), ended.append)
        answer.slot = Slot(answer.request, answer.on_token, answer.on_ended)
        answer.slot.end("length", None)
        async for _ in answer.pieces():
            pass

    with pytest.raises(RequestError, match="^the request failed inside the server"):
        asyncio.run(asyncio.wait_for(read(), 5))
    assert [slot.end_reason for slot in ended] == ["error"]


def test_a_client_hears_that_logits_are_no_numbers():
    slot = Slot(Request([1], 1), end_reason="error", error=InvalidLogits())
    assert str(_failure(slot)).startswith("the model's largest logit must be a finite number")


def a_policy(load: Load) -> tuple[int, int]:
    return 4, 16


def test_policies_by_name():
    assert load_policy(f"{__name__}:a_policy")(Load()) == (4, 16)
    table = TablePolicy(table_rows(16, 512), first_token_limit=2.0)
    assert isinstance(table, TablePolicy)
    assert [table(Load(time_to_first_token=seconds)) for seconds in (0.5, 1.5, 5)] == [
        (16, 512),
        (32, 256),
        (64, 128),
    ]
    for wrong, message in (
        ("nothing", "policy must be 'elastic', 'fixed' or module:function"),
        ("no_module:f", "policy 'no_module:f' cannot be loaded"),
        (f"{__name__}:nobody", f"policy '{__name__}:nobody' cannot be loaded"),
        (f"{__name__}:KEY", "policy must be a function of a Load"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            load_policy(wrong)


def test_a_policy_whose_module_raises_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "raising_policy.py").write_text("policy = 1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"cannot be loaded: ZeroDivisionError: division by zero\.$"
    ):
        load_policy("raising_policy:policy")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--port", "70000"], "port must be 0 to 65535"),
        (["--policy", "wild"], "policy must be 'elastic'"),
        (["--model", "nowhere/at/all"], "model 'nowhere/at/all' does not exist"),
        (["--api-key-file", "nowhere"], "file 'nowhere' does not exist"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(arguments, message, capfd, monkeypatch):
    assert main(["serve", *arguments]) == 2
    assert capfd.readouterr().err.startswith(f"error: {message}")


def test_a_server_that_says_it_listens_does(monkeypatch):
    import socket

    from corecontext.serve import build as runs

    reached = []

    def says(event, *, host="", port=0, **fields):
        if event == "listening":
            socket.create_connection((host, port), timeout=5).close()
            reached.append(port)

    worker = types.SimpleNamespace(failed=False, alive=False)
    monkeypatch.setattr(
        runs,
        "make_app",
        lambda serving: types.SimpleNamespace(
            state=types.SimpleNamespace(worker=worker, service=mock.Mock())
        ),
    )
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: sockets[0].close())
    monkeypatch.setattr("corecontext.serve.logs.start_logging", lambda: None)
    monkeypatch.setattr("corecontext.serve.logs.log_event", says)
    assert runs.run(Serving(port=0)) == 0 and len(reached) == 1
    worker.failed = True
    assert runs.run(Serving(port=0)) == 1


def test_random_weights_and_names(folder, monkeypatch):
    from benchmarks.random_server import load_random
    from corecontext.serve import build

    monkeypatch.setattr(build, "load", load_random)
    app = build.make_app(Serving(folder, method="full", device="cpu", cache_mib=64))
    service = app.state.service
    assert service.serving.model_name == Path(folder).name and service.scheduler.full
    made = []
    service.scheduler.submit(Request([1, 2, 3], 4), made.append)
    while not service.scheduler.idle:
        service.scheduler.run_turn()
    assert len(made) == 4 and Serving().model_name == NAME and Serving(name="x").model_name == "x"
