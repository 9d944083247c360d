"""The parts of the server by themselves: fields, statuses, headers, deadlines, replies, metrics. No
model runs: answers are scripted."""

import asyncio
import functools
import json
import logging
import re
import time
from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("fastapi")
httpx, uvicorn = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")

from fastapi.responses import PlainTextResponse  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from served import Letters  # noqa: E402

from corecontext.config import CCAConfig  # noqa: E402
from corecontext.cost import CacheBytes  # noqa: E402
from corecontext.files import UserError  # noqa: E402
from corecontext.inference.policy import SIZE_NAMES  # noqa: E402
from corecontext.inference.sampling import InvalidLogits, Sampling  # noqa: E402
from corecontext.serve import guard, protocol  # noqa: E402
from corecontext.serve.errors import Code, RequestError  # noqa: E402
from corecontext.serve.http import create_app  # noqa: E402
from corecontext.serve.logprobs_writer import LogprobsWriter  # noqa: E402
from corecontext.serve.metrics import Metrics, labels_of, sizes_of  # noqa: E402
from corecontext.serve.reply import Choice, Reply  # noqa: E402
from corecontext.serve.request import Request, Slot, TokenLogprobs  # noqa: E402
from corecontext.serve.scheduler import UNLIMITED  # noqa: E402
from corecontext.serve.settings import BUNDLED, Serving  # noqa: E402
from corecontext.serve.text import TextStream  # noqa: E402
from corecontext.serve.token_text import TokenText  # noqa: E402
from corecontext.serve.worker import Answer, Worker, _failure  # noqa: E402

CONFIG = CCAConfig.paper(4, 8)
END = "\x03"


class Scripted:
    """A server whose worker answers each prompt with the next of some texts; a text that ends with
    an Exception or a reason ends so.

    Attributes:
        requests: Taken so far.
        cancelled: Their numbers, in the order in which they were cancelled.
    """

    def __init__(self, *answers, config=CONFIG, eos=None, **settings):
        model = mock.MagicMock()
        model.generation_config.eos_token_id = eos
        model.config.get_text_config.return_value.vocab_size = 128
        self.scheduler = mock.MagicMock(max_length=64, policy=None, model=model)
        self.scheduler.admission.config = CONFIG
        self.scheduler.memory.shape.bytes_of.return_value = CacheBytes(5, 7)
        self.app = create_app(self.scheduler, Letters(), Serving(name="m", **settings))
        self.service = self.app.state.service
        self.service.worker.submit = self.submit
        self.service.worker.cancel = lambda answer: self.cancelled.append(
            self.requests.index(answer.request)
        )
        self.answers = list(answers)
        self.config = config
        self.requests = []
        self.texts = []
        self.cancelled = []

    def submit(self, request, text):
        script = self.answers[len(self.requests)]
        if isinstance(script[-1], Exception) and len(script) == 1:
            raise script[-1]
        self.requests.append(request)
        self.texts.append(text)
        answer = Answer(request, text, self.service._ended)
        answer.slot = Slot(request, answer.on_token, answer.on_ended, answer.on_logprobs)
        answer.slot.config = self.config
        reason = "length"
        for token in script:
            if isinstance(token, Exception) or len(token) > 1:
                reason = token
                break
            if request.logprobs is not None:
                top = [(ord(token), -0.5), (ord("z"), -2.0)][: request.logprobs]
                answer.slot.logprobs.append(TokenLogprobs(ord(token), -0.5, top))
            reason = answer.slot.take(ord(token)) or "length"
            if reason == "stop":
                break
        error = reason if isinstance(reason, Exception) else None
        answer.slot.end("error" if error else reason, error)
        return answer

    def ask(self, path="/v1/completions", method="POST", headers=None, **body):
        if path == "/v1/completions":
            body = {"model": "m", "prompt": "ab", **body}
        elif path == "/v1/chat/completions":
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}

        async def send():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                options = {"json": body} if method == "POST" else {}
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(asyncio.wait_for(send(), 20))


@functools.cache
def one_server():
    """Make a server once for the tests that only ask it."""
    return Scripted("x" * 64, eos=[7], time_limit_s=5.0)


@pytest.fixture
def server():
    server = one_server()
    server.requests.clear()
    server.texts.clear()
    return server


# Fields

COMPLETION = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
FIELDS = {
    "model": (["a" * 1000], ["a" * 1001, 5, None]),
    "max_tokens": ([None, 0, 2**31], [-1, 2**31 + 1, 1.0, "5", True]),
    "temperature": ([None, 0, 2, 0.5], [-0.01, 2.01, "1"]),
    "top_p": ([None, 1e-9, 1], [0, 1.01, -1]),
    "top_k": ([None, 1, 2**31], [0, 2**31 + 1, 2.0]),
    "seed": ([None, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
    "stop": (
        [None, "a", "a" * 1000, [], ["ab"] * 16],
        ["", "a" * 1001, ["a"] * 17, [""], ["a" * 1001], "\ud800", 5],
    ),
    "stream": ([None, True, False], [1, "true"]),
    "stream_options": (
        [None, {}, {"include_usage": True, "include_obfuscation": True}],
        [{"x": 1}, [], True],
    ),
    "group_size": ([None, 1, 2**20], [0, 2**20 + 1]),
    "window_size": ([None, 1, 2**24], [0, 2**24 + 1]),
    "fetch_groups": ([None, 0, 2**20], [-1, 2**20 + 1, True, 1.0, "1"]),
    "ignore_eos": ([None, True, False], [0, "no"]),
    "user": ([None, 5, {"a": []}], []),
    "metadata": ([None, 5, {"a": []}], []),
    "service_tier": ([None, "auto"], []),
    "safety_identifier": ([None, "x"], []),
    "prompt_cache_key": ([None, "x"], []),
    "prompt_cache_retention": ([None, "x"], []),
    "store": ([None, False], [True, 0]),
    "n": ([None, 1], [0, 2, 1.0]),
    "presence_penalty": ([None, 0, 0.0], [0.1, -0.1]),
    "frequency_penalty": ([None, 0, 0.0], [0.1, -0.1]),
    "min_p": ([None, 0, 0.0], [0.1, -0.1]),
    "repetition_penalty": ([None, 1, 1.0], [1.1, 0.9]),
    "logit_bias": ([None, {}], [{"5": 0.0}]),
    "prompt": (
        ["", "a", [0], [2**31], ["a"] * 128, [[1, 2]] * 128],
        [None, 5, [], [[]], [-1], [2**31 + 1], ["a"] * 129, [[1]] * 129, ["a", 5], "\ud800"],
    ),
    "best_of": ([None, 1], [0, 2]),
    "echo": ([None, True, False], [1]),
    "logprobs": ([None, 0, 20], [-1, 21, True]),
    "suffix": ([None, ""], ["x", 0]),
}
USER = {"role": "user", "content": "a"}
UNUSED_OF_A_MESSAGE = ("refusal", "annotations", "audio", "function_call", "tool_calls")
CHAT_FIELDS = {
    "messages": (
        [
            [USER] * 4096,
            *([{"role": role, "content": "a"}] for role in ("system", "developer")),
            *(
                [{**USER, name: value}]
                for name in (*UNUSED_OF_A_MESSAGE, "x")
                for value in (None, "", [], {})
            ),
        ],
        [
            [],
            [USER] * 4097,
            [{**USER, "role": "tool"}],
            [{**USER, "content": []}],
            [{**USER, "x": 1}],
            *([{**USER, name: [1]}] for name in UNUSED_OF_A_MESSAGE),
        ],
    ),
    "max_completion_tokens": ([None, 1, 2**31], [0, 2**31 + 1]),
    "max_tokens": ([None, 1, 2**31], [0, 2**31 + 1]),
    "logprobs": ([None, True, False], [1, 5]),
    "top_logprobs": ([None, 0, 20], [-1, 21]),
    "parallel_tool_calls": ([None, True, False], []),
    "tool_choice": ([None, "none", "auto"], ["required"]),
    "response_format": ([None, {"type": "text"}], [{"type": "json_object"}, {}]),
    "modalities": ([None, [], ["text"]], [["audio"], "text"]),
    "echo": ([], [True]),
    "best_of": ([], [1]),
    "tools": ([], [[1], 0, False]),
}


@pytest.mark.parametrize(
    "kind, body, name, taken, refused",
    [
        *((protocol.CompletionRequest, COMPLETION, name, *both) for name, both in FIELDS.items()),
        *((protocol.ChatRequest, CHAT, name, *both) for name, both in CHAT_FIELDS.items()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_field_has_its_bounds(kind, body, name, taken, refused):
    for value in taken:
        assert getattr(kind.model_validate({**body, name: value}), name) is not Ellipsis
    for value in refused:
        with pytest.raises(ValidationError):
            kind.model_validate({**body, name: value})


def test_no_field_is_left_out_of_the_table():
    both = {**FIELDS, **CHAT_FIELDS}
    for kind, table in ((protocol.CompletionRequest, FIELDS), (protocol.ChatRequest, both)):
        assert set(kind.model_fields) <= set(table)
        assert {field for field, info in kind.model_fields.items() if info.is_required()} == {
            "model",
            "prompt" if kind is protocol.CompletionRequest else "messages",
        }
    body = protocol.CompletionRequest.model_validate(COMPLETION)
    assert {name for name, value in body if value is not None} == set(COMPLETION)


def test_fields_that_have_two_forms_are_read_as_one():
    def completion(**body):
        return protocol.CompletionRequest.model_validate({**COMPLETION, **body})

    def chat(**body):
        return protocol.ChatRequest.model_validate({**CHAT, **body})

    assert completion().stops == [] and completion(stop="a").stops == ["a"]
    assert completion(stop=["a", "b"]).stops == ["a", "b"]
    assert completion(prompt="ab").prompts == ["ab"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[[1], [2]]).prompts == [[1], [2]]
    tops = [completion(logprobs=count).top for count in (None, 0, 5)]
    assert tops == [None, 0, 5]
    assert [chat(logprobs=True, top_logprobs=count).top for count in (None, 0, 5)] == [0, 0, 5]
    assert chat(top_logprobs=5).top is None and chat(logprobs=False, top_logprobs=5).top is None
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = chat(messages=[{"role": "user", "content": text, "name": "x", "refusal": None}])
    assert message.messages[0].text == "ab" and chat().messages[0].text == "a"


@pytest.mark.parametrize(
    "body, message, param",
    [
        ({"n": 2}, "n must be 1: a prompt gets one answer, got 2.", "n"),
        ({"n": "\u00fc"}, "n must be 1: a prompt gets one answer, got '\\xfc'.", "n"),
        ({"best_of": 3}, "best_of must be 1: a prompt gets one answer, got 3.", "best_of"),
        ({"min_p": 0.1}, "min_p must be 0: it is not supported, got 0.1.", "min_p"),
        (
            {"presence_penalty": -1},
            "presence_penalty must be 0: it is not supported, got -1.",
            "presence_penalty",
        ),
        (
            {"repetition_penalty": 2.0},
            "repetition_penalty must be 1: it is not supported, got 2.0.",
            "repetition_penalty",
        ),
        ({"store": True}, "store must be false: it is not supported, got True.", "store"),
        (
            {"prompt": ..., "messages": [{**USER, "name": "\ud800"}]},
            "messages.0.name must be valid Unicode, got half a character (an unpaired surrogate).",
            "messages",
        ),
        ({"tools": [{}]}, "field 'tools' is not supported. Leave it out.", "tools"),
        ({"suffix": "b"}, "suffix must be null or empty: it is not supported, got 'b'.", "suffix"),
        (
            {"prompt": ..., "messages": [USER], "response_format": {"type": "json_object"}},
            "response_format must be {'type': 'text'}: JSON mode and schemas are not supported",
            "response_format",
        ),
        ({"stream_options": {"x": 1}}, "field 'stream_options.x' is not supp", "stream_options"),
        ({"max_tokens": "5"}, "max_tokens is not valid: Input should be a valid in", "max_tokens"),
        ({"prompt": ...}, "field 'prompt' must be given.", "prompt"),
        (
            {"stop": 5},
            "stop must be a text of 1 to 1000 characters or a list of at most 16 of them, got 5.",
            "stop",
        ),
        (
            {"prompt": ["a", [1]]},
            "prompt must be a text without unpaired surrogates, a list of token numbers from 0 on, "
            "or a list of 1 to 128 of either, got ['a', [1]].",
            "prompt",
        ),
        ({"f" * 5000: 1}, f"field '{'f' * 100}' is not supported", "f" * 100),
    ],
    ids=str,
)
def test_a_refusal_is_one_plain_line_that_names_the_field(server, body, message, param):
    body = {**COMPLETION, **body}
    content = json.dumps({name: value for name, value in body.items() if value is not ...})

    async def send():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"content-type": "application/json"}
            path = "chat/completions" if "messages" in body else "completions"
            return await client.post(f"/v1/{path}", content=content, headers=headers)

    response = asyncio.run(send())
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"].startswith(message)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert error["code"] is None and not server.requests


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_a_body_of_another_content_type_is_told_the_header(server, headers):
    """curl's -d sends this one, a page of a stranger in a browser none."""

    async def send():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            content = json.dumps(COMPLETION)
            return await client.post("/v1/completions", content=content, headers=headers)

    response = asyncio.run(send())
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and not server.requests
    assert message.endswith("Send it with the header 'Content-Type: application/json'.")


def test_the_error_of_an_answer_follows_how_its_request_ended():
    def code(reason, error=None):
        return _failure(Slot(Request([1], 1), end_reason=reason, error=error)).code

    assert code("timeout") is Code.TIMEOUT and code("cancelled") is Code.CANCELLED
    assert code("timeout", MemoryError()) is Code.TIMEOUT
    for error in (MemoryError(), RuntimeError("can't allocate memory: you tried")):
        assert code("error", error) is Code.OUT_OF_MEMORY
    assert code("error", InvalidLogits()) is code("error", ValueError()) is Code.INTERNAL
    late = _failure(Slot(Request([1], 9), end_reason="timeout", made=7))
    assert "; 7 tokens were made" in str(late)


# Replies


def events_of(response):
    lines = response.text.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def test_a_whole_answer_has_the_protocols_form():
    server = Scripted("xyz", "uv" + END, eos=[3])
    before = int(time.time())
    response = server.ask(prompt=["ab", "cde"], max_tokens=3)
    whole = response.json()
    assert response.status_code == 200 and re.fullmatch("cmpl-[0-9a-f]{32}", whole.pop("id"))
    assert before <= whole.pop("created") <= time.time()
    assert re.fullmatch("replica-[0-9a-f]{8}", whole.pop("system_fingerprint"))
    assert whole == {
        "object": "text_completion",
        "model": "m",
        "choices": [
            {"index": 0, "finish_reason": "length", "logprobs": None, "text": "xyz"},
            {"index": 1, "finish_reason": "stop", "logprobs": None, "text": "uv"},
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
            "cache_bytes": {"device": 10, "host": 14, "full_attention": 10},
        },
        "corecontext": {"group_size": 4, "window_size": 8, "fetch_groups": 0},
    }
    assert server.cancelled == [0, 1]  # without effect after the end


def test_a_whole_chat_has_the_protocols_form():
    server = Scripted("yes")
    whole = server.ask("/v1/chat/completions", max_tokens=3).json()
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", whole["id"])
    assert whole["object"] == "chat.completion"
    message = {"role": "assistant", "content": "yes", "refusal": None}
    choice = {"index": 0, "finish_reason": "length", "logprobs": None, "message": message}
    assert whole["choices"] == [choice]
    assert server.requests[0].prompt == [ord(letter) for letter in "user: hi\nassistant:"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_a_stream_has_the_protocols_form(options):
    server = Scripted("xy")
    asked = {"max_tokens": 2, "stream": True, "stream_options": options}
    response = server.ask(**asked)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *events, done = events_of(response)
    heads = [
        {name: event.pop(name) for name in ("id", "created", "model", "object")} for event in events
    ]
    assert done == "[DONE]" and all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "text_completion"
    wants_usage = bool(options and options.get("include_usage"))
    more = {"usage": None} if wants_usage else {}
    more |= {"corecontext": {"group_size": 4, "window_size": 8, "fetch_groups": 0}}
    more["system_fingerprint"] = server.service.fingerprint
    body = {"index": 0, "logprobs": None}
    expected = [
        {"choices": [{**body, "finish_reason": None, "text": "x"}], **more},
        {"choices": [{**body, "finish_reason": None, "text": "y"}], **more},
        {"choices": [{**body, "finish_reason": "length", "text": ""}], **more},
    ]
    if wants_usage:
        usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}
        usage["cache_bytes"] = {"device": 5, "host": 7, "full_attention": 5}
        expected.append({**more, "choices": [], "usage": usage})
    assert events == expected and server.cancelled == [0]


def test_a_stream_of_a_chat_names_the_role_once():
    *events, done = events_of(Scripted("xy").ask("/v1/chat/completions", max_tokens=2, stream=True))
    assert done == "[DONE]" and {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": "x"}, {"content": "y"}, {}]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None, None, "length"]
    *events, done = events_of(
        Scripted(END, eos=3).ask("/v1/chat/completions", max_tokens=2, stream=True)
    )
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant"}]


def test_a_stream_that_fails_ends_with_the_error_alone():
    server = Scripted(["x", RuntimeError("words of a prompt")], ["y", "timeout"])
    for prompt, code in (("a", "internal_error"), ("b", "timeout")):
        *events, last = events_of(server.ask(prompt=prompt, max_tokens=2, stream=True))
        assert len(events) == 1 and last["error"]["code"] == code and "words" not in str(last)
    assert server.cancelled == [0, 1]
    whole = Scripted(["x", "timeout"]).ask(max_tokens=2)
    assert whole.status_code == 408 and whole.json()["error"]["code"] == "timeout"


def test_the_answers_of_a_stream_are_ended_with_the_first_that_fails():
    server = Scripted(["x", "cancelled"], "yz")
    events = events_of(server.ask(prompt=["a", "b"], max_tokens=2, stream=True))
    assert "[DONE]" not in events and events[-1]["error"]["code"] == "cancelled"
    assert server.cancelled == [0, 1]


def test_a_stream_whose_answer_cannot_be_written_ends_with_an_error(monkeypatch, caplog):
    """The client would wait for ever."""
    monkeypatch.setattr(LogprobsWriter, "write", lambda *given: {}["words of a prompt"])
    server = Scripted("xy")
    with caplog.at_level(logging.ERROR, "corecontext.serve"):
        response = server.ask(max_tokens=2, stream=True, logprobs=0)
    assert [event["error"]["code"] for event in events_of(response)] == ["internal_error"]
    assert server.cancelled == [0] and "words" not in response.text
    assert [record.message for record in caplog.records] == ["an answer could not be written"]


def test_no_answer_is_made_for_a_client_that_gets_an_error(monkeypatch):
    """Making the reply fails after its requests were accepted."""
    server = Scripted("x", "y")
    monkeypatch.setattr(server.service, "_choice", lambda *given: [][0])
    with pytest.raises(IndexError):
        server.ask(prompt=["a", "b"], max_tokens=1)
    assert server.cancelled == [0, 1]


@pytest.mark.parametrize(
    "error, status",
    [
        (RequestError(Code.QUEUE_FULL, "full"), 429),
        (ValueError("wrong"), 400),
        (TypeError("x"), 400),
    ],
)
def test_a_prompt_that_is_refused_cancels_those_before_it(error, status):
    server = Scripted("x", "y", [error])
    response = server.ask(prompt=["a", "b", "c"], max_tokens=1)
    assert response.status_code == status and response.json()["error"]["message"] == str(error)
    assert server.cancelled == [0, 1]


def test_sizes_are_named_where_all_prompts_have_them():
    for configs, sizes in (
        ([CONFIG, CONFIG], (4, 8, 0)),
        ([CONFIG, CCAConfig.paper(4, 9)], (None,) * 3),
        ([CONFIG, CONFIG.replace(fetch_groups=2)], (None,) * 3),
        ([None, None], (None,) * 3),
        ([CCAConfig.paper(4, 8, layer_group_sizes=(2, 4))] * 2, (None, 8, 0)),
    ):
        server = Scripted("x", "y")
        submit, left = server.service.worker.submit, list(configs)

        def next_config(request, text, server=server, submit=submit, left=left):
            server.config = left.pop(0)
            return submit(request, text)

        server.service.worker.submit = next_config
        whole = server.ask(prompt=["a", "b"], max_tokens=1).json()["corecontext"]
        assert tuple(whole[name] for name in SIZE_NAMES) == sizes


def test_log_probabilities_follow_the_text():
    asked = {"max_tokens": 3, "logprobs": 1}
    choice = Scripted("xyz").ask(**asked).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "z"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"x": -0.5}, {"y": -0.5}, {"z": -0.5}],
        "text_offset": [2, 3, 4],
    }
    # A prompt of token numbers stands at the same offsets, special tokens without text.
    choice = Scripted("xyz").ask(**asked, prompt=[3, 97, 98]).json()["choices"][0]
    assert choice["logprobs"]["text_offset"] == [2, 3, 4]
    stopped = Scripted("xyz").ask(**asked, stop="z").json()["choices"][0]
    assert stopped["text"] == "xy" and stopped["logprobs"]["tokens"] == ["x", "y"]
    ended = Scripted("xy" + END, eos=[3]).ask(**asked).json()["choices"][0]
    assert ended["text"] == "xy" and ended["logprobs"]["tokens"] == ["x", "y", END]
    none = Scripted("xy").ask(max_tokens=2, logprobs=0).json()["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [None, None] and none["token_logprobs"] == [-0.5, -0.5]
    chat = Scripted("xy").ask("/v1/chat/completions", max_tokens=2, logprobs=True, top_logprobs=2)
    found = chat.json()["choices"][0]["logprobs"]
    first = {"token": "x", "logprob": -0.5, "bytes": [120]}
    second = {"token": "z", "logprob": -2.0, "bytes": [122]}
    assert found["refusal"] is None and len(found["content"]) == 2
    assert found["content"][0] == {**first, "top_logprobs": [first, second]}


def test_of_two_tokens_with_one_text_the_likelier_is_named():
    texts = SimpleNamespace(text=lambda token: ("a", b"a"), shown=lambda token: b"a")
    writer = LogprobsWriter(texts, False, 5)
    records = [TokenLogprobs(1, -3.0, [(2, -1.0), (4, -2.0)]), TokenLogprobs(1)]
    written = writer.write(records, 6)
    assert written["top_logprobs"] == [{"a": -1.0}] and written["text_offset"] == [5]
    assert records == [] and writer.write([], 6) is None  # the second one begins at 6
    assert writer.write([], 7)["top_logprobs"] == [None]
    early = LogprobsWriter(texts, False, -2)  # more tokens than characters
    assert early.write([TokenLogprobs(1)] * 4, 9)["text_offset"] == [0, 0, 0, 1]


def test_the_text_of_a_token_is_its_bytes_where_it_is_no_character():
    names = {1: "<0xE2>", 2: "\u0120\u00c3", 3: "\ufffdx", 4: "abc"}

    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return {"input_ids": [0]}

        def convert_ids_to_tokens(self, token):
            return names[token]

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            assert not clean_up_tokenization_spaces
            assert ids[0] == 0, "a token is decoded behind another"
            return "a" + "".join(
                {1: "\ufffd", 2: " \ufffd", 3: "\ufffdx", 4: "abc"}[i]
                for i in ids[1:]
                if not (skip_special_tokens and i == 4)
            )

    texts = TokenText(Tokenizer())
    assert texts.text(1) == ("\\xe2", b"\xe2")
    assert texts.text(2) == ("\\x20\\xc3", b" \xc3")
    assert texts.text(3) == ("\ufffdx", "\ufffdx".encode())
    assert texts.text(4) == ("abc", b"abc") and texts.shown(4) == b""
    assert texts.shown(1) == b"\xe2" and texts.length([1, 4, 2]) == 3


# Requests


def translated(path="/v1/completions", **body):
    server = one_server()
    server.requests.clear()
    before = time.monotonic()
    assert server.ask(path, **body).status_code == 200
    request = server.requests[0]
    assert before <= request.arrived <= time.monotonic()
    assert request.deadline == request.arrived + 5.0
    return request


def test_the_fields_of_a_body_reach_the_scheduler():
    plain = translated()
    assert (plain.prompt, plain.max_new_tokens, plain.eos) == ([97, 98], 16, {7})
    assert plain.sampling == Sampling(1.0, None, 1.0)
    assert (plain.group_size, plain.window_size, plain.fetch_groups) == (None, None, None)
    assert plain.logprobs is None and not plain.prompt_logprobs
    assert plain.seed != translated().seed and 0 <= plain.seed < 2**63
    full = translated(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=9,
        seed=0,
        ignore_eos=True,
        group_size=2,
        window_size=6,
        fetch_groups=0,
        logprobs=4,
    )
    assert full.sampling == Sampling(0.5, 9, 0.25) and full.seed == 0 and full.eos == frozenset()
    assert (full.max_new_tokens, full.group_size, full.window_size) == (5, 2, 6)
    assert full.fetch_groups == 0
    assert full.logprobs == 4 and not full.prompt_logprobs
    assert translated(temperature=0).sampling == Sampling(0.0)
    assert translated(echo=True, logprobs=0).prompt_logprobs
    assert not translated(echo=True).prompt_logprobs
    assert translated(max_tokens=0, echo=True).max_new_tokens == 0


def test_the_next_turn_ends_a_chat_without_a_template():
    text = "a\nuser: b"
    answer = Scripted(text).ask("/v1/chat/completions").json()["choices"][0]
    assert answer["message"]["content"] == "a" and answer["finish_reason"] == "stop"
    assert Scripted(text).ask().json()["choices"][0]["text"] == text


def test_a_chat_without_a_limit_gets_as_many_tokens_as_fit():
    chat = "/v1/chat/completions"
    length = len("user: hi\nassistant:")
    assert translated(chat).max_new_tokens == 64 - length
    assert translated(chat, max_tokens=5).max_new_tokens == 5
    assert translated(chat, max_tokens=5, max_completion_tokens=4).max_new_tokens == 4
    server = Scripted("x", "x")
    server.scheduler.max_length = 10**6
    server.ask(chat)
    server.scheduler.max_length = length
    server.ask(chat)
    assert [request.max_new_tokens for request in server.requests] == [1024, 1]


@pytest.mark.parametrize(
    "body, status, message, param",
    [
        ({"model": "x" * 200}, 404, f"model '{'x' * 100}' is not served here. Use 'm'.", "model"),
        ({"prompt": ""}, 400, "prompt must have at least one token, got an empty one.", "prompt"),
        ({"prompt": [7, 128]}, 400, "prompt must hold token numbers below 128, got 128.", "prompt"),
        (
            {"max_tokens": 0},
            400,
            "max_tokens must be at least 1 without echo, got 0.",
            "max_tokens",
        ),
        (
            {"stream_options": {}},
            400,
            "stream_options must be given with stream, got it without.",
            "stream_options",
        ),
        *(
            (
                {"path": "/v1/chat/completions", "top_logprobs": count},
                400,
                "top_logprobs must be given with logprobs, got it without.",
                "top_logprobs",
            )
            for count in (0, 1)
        ),
    ],
    ids=str,
)
def test_a_refused_request_reaches_no_worker(server, body, status, message, param):
    response = server.ask(**body)
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["param"]) == (status, message, param)
    assert not server.requests
    assert server.ask(prompt=[127]).status_code == 200


def test_a_request_that_ends_is_a_line_of_the_log_without_its_words(monkeypatch, caplog):
    monkeypatch.setattr(time, "monotonic", lambda: 13.00004)
    try:
        json.loads("{words")
    except ValueError as error:
        failure = error
    service = Scripted().service
    sizes = {"group_size": None, "window_size": None, "fetch_groups": None}
    counts = {"prompt_tokens": 2, "cached_tokens": 1, "completion_tokens": 3}
    times = {"queued_s": None, "first_token_s": None, "total_s": 3.0}
    at = {"config": CCAConfig(4, 8, fetch_groups=5), "started": 10.25, "first_token_at": 11.5}
    for reason, error, settings, expected, level in (
        ("stop", None, at, {}, "INFO"),
        ("timeout", None, {}, sizes | times, "INFO"),
        ("error", failure, {}, sizes | times, "ERROR"),
    ):
        slot = Slot(Request([1, 2], 9, arrived=10.0), end_reason=reason, error=error, **settings)
        slot.made = 3
        slot.cached_tokens = 1
        with caplog.at_level(logging.INFO, "corecontext.serve"):
            service._ended(slot)
        record = caplog.records[-1]
        assert (record.message, record.levelname) == ("request", level)
        place = record.fields.pop("at", None)
        assert (place is None) == (error is None)
        known = {"group_size": 4, "window_size": 8, "fetch_groups": 5} | counts
        known |= {"queued_s": 0.25, "first_token_s": 1.5, "total_s": 3.0, "outcome": reason}
        if error is not None:
            assert "json/decoder.py:" in place and place.count(":") == 1
            known["error"] = "JSONDecodeError"
        assert record.fields == known | expected


def test_paths_and_methods_that_are_not_there():
    server = Scripted()
    wrong = server.ask("/v1/completions", "GET")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == "the method is not allowed here."
    assert {server.ask(path, "GET").status_code for path in ("/docs", "/redoc", "/v1")} == {404}
    nothing = server.ask("/v1/nothing", "GET")
    assert nothing.status_code == 404 and nothing.json()["error"] == {
        "message": "there is no such path. See /openapi.json.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert server.app.user_middleware[0].kwargs["max_bytes"] == 2**20 + 32 * 64
    unlimited = mock.MagicMock(max_length=UNLIMITED, policy=None)
    app = create_app(unlimited, Letters(), Serving(name="m"))
    assert app.user_middleware[0].kwargs["max_bytes"] == 2**20 + 2**27
    card = server.ask("/v1/models", "GET").json()
    assert card["object"] == "list" and card["data"] == [server.ask("/v1/models/m", "GET").json()]
    del card["data"][0]["created"]
    sizes = {"max_model_len": 64, "has_chat_template": False}
    assert card["data"] == [{"id": "m", "object": "model", "owned_by": "corecontext", **sizes}]


def test_the_schema_names_the_model_and_the_refusals():
    schema = Scripted().app.openapi()
    statuses = {"200", "400", "401", "403", "404", "408", "413", "429", "503"}
    for path, kind in (("completions", "CompletionRequest"), ("chat/completions", "ChatRequest")):
        assert set(schema["paths"][f"/v1/{path}"]["post"]["responses"]) == statuses
        assert schema["components"]["schemas"][kind]["properties"]["model"]["enum"] == ["m"]
    assert set(schema["paths"]["/v1/models/{name}"]["get"]["responses"]) == {
        *("200", "400", "401", "404")
    }
    refused = schema["paths"]["/v1/completions"]["post"]["responses"]["429"]
    assert refused["description"] == "The queue is full."
    assert "Error" in str(refused["content"]["application/json"]["schema"])
    unready = schema["paths"]["/ready"]["get"]["responses"]["503"]
    assert "Status" in str(unready["content"]["application/json"]["schema"])
    store = schema["components"]["schemas"]["ChatRequest"]["properties"]["store"]
    assert {"const": False} in [{"const": kind.get("const")} for kind in store["anyOf"]]


# Guard and connections


def through_guard(
    headers=(), method="POST", path="/v1/x", most=1000, parts=((b"", False),), **options
):
    """Send one request past a guard to an application that reads its body and says hello.

    Returns:
        Status, headers and body of the answer, and the types of the messages that reached the
        application.
    """
    worker = SimpleNamespace(draining=options.pop("draining", False))
    reached, sent, parts = [], [], deque(parts)

    async def app(scope, receive, send):
        while True:
            message = await receive()
            reached.append(message["type"])
            if message["type"] == "http.disconnect":
                return
            if not message.get("more_body"):
                break
        await PlainTextResponse("hello")(scope, receive, send)

    async def receive():
        body, more = parts.popleft()
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers]
    guarded = guard.Guard(
        app, options.pop("api_key", None), worker, mock.MagicMock(), most, **options
    )
    asyncio.run(guarded(scope, receive, send))
    starts = [message for message in sent if message["type"] == "http.response.start"]
    assert len(starts) == 1
    answered = {name.decode(): value.decode() for name, value in starts[0]["headers"]}
    return starts[0]["status"], answered, b"".join(x.get("body", b"") for x in sent), reached


def test_a_body_of_exactly_the_limit_is_read():
    for size, status in ((1000, 200), (1001, 413)):
        assert through_guard(parts=[(b"x" * size, False)])[0] == status
        assert through_guard(parts=[(b"x" * 500, True), (b"x" * (size - 500), False)])[0] == status
        found = through_guard([("content-length", str(size))])
        assert found[0] == status and bool(found[3]) == (status == 200)
    assert through_guard([("content-length", "9" * 5000)])[0] == 413
    assert through_guard([("content-length", "x")])[0] == 200
    # The limit holds for every path, the header alone under /v1.
    assert through_guard(path="/x", parts=[(b"x" * 1001, False)])[0] == 413


def test_a_shutdown_refuses_new_work_alone():
    assert through_guard(draining=True)[0] == 503
    assert through_guard(draining=True, method="GET")[0] == 200
    assert through_guard(draining=True, path="/ready")[0] == 200
    assert through_guard(draining=True, api_key="k")[0] == 401


def test_refusals_say_how_to_go_on():
    both = [("content-length", "3"), ("transfer-encoding", "chunked")]
    status, headers, _, reached = through_guard(both, path="/health")
    assert status == 400 and headers["connection"] == "close" and not reached
    status, headers, body, _ = through_guard(api_key="k")
    assert status == 401 and headers["www-authenticate"] == "Bearer" and b"invalid_api_key" in body
    status, headers, body, _ = through_guard([("host", "x" * 500)], local=True)
    assert status == 403 and "connection" not in headers and b"x" * 101 not in body
    assert b"x" * 100 in body
    assert through_guard(local=True)[0] == 200  # HTTP/1.0 needs no Host
    for path in ("/v1", "/v1x", "/health"):
        assert through_guard(path=path, api_key="k")[0] == 200


def test_addresses_of_this_machine():
    inside = ("localhost", "127.0.0.1", "127.1.2.3", "::1")
    outside = ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "example")
    assert all(map(guard.is_loopback, inside)) and not any(map(guard.is_loopback, outside))


def test_a_stream_that_is_left_waits_for_no_answer():
    async def leave():
        answer = Answer(Request([1], 9), TextStream(Letters()), lambda slot: None)
        answer.slot = Slot(answer.request)
        events = Reply([Choice(answer, 0, "")], "m", "replica-1", False, None).events(False)
        answer.on_token(ord("x"))
        assert '"text": "x"' in await events.__anext__()
        await events.aclose()
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(leave()) == set()


# Logs and metrics


def gauges(scheduler, policy=None, config=CONFIG):
    scheduler = SimpleNamespace(
        policy=policy, admission=SimpleNamespace(config=config), **scheduler
    )
    return Metrics(scheduler)


def test_metrics_count_the_requests_that_ended():
    memory = SimpleNamespace(
        budget=90,
        counted=lambda: (CacheBytes(30, 4), CacheBytes(43, 6)),
        prefixes=SimpleNamespace(counted=lambda: CacheBytes(7, 5)),
        shape=SimpleNamespace(host_rate=0.5),
    )
    running = [Slot(Request([1], 1), config=CONFIG) for _ in range(2)]
    running += [
        Slot(Request([1], 1, group_size=2), config=CCAConfig.paper(2, 8)),
        Slot(Request([1], 1)),
    ]
    metrics = gauges({"memory": memory, "waiting": [1, 2, 3], "active": lambda: running})
    request = Request([1] * 10, 9, arrived=100.0)
    whole = Slot(request, config=CONFIG, end_reason="stop", read=10, cached_tokens=4, made=5)
    whole.first_token_at = 102.0
    single = Slot(request, config=CONFIG, end_reason="stop", read=10, made=1, first_token_at=101.0)
    pair = Slot(request, config=CONFIG, end_reason="stop", read=10, made=2, first_token_at=109.0)
    early = Slot(request, end_reason="cancelled")
    branched = Slot(request, config=CONFIG, end_reason="cancelled", read=0, cached_tokens=6)
    for slot in (whole, single, pair, early, branched):
        metrics.ended(slot, 110.0)

    def value(name, **labels):
        return metrics.registry.get_sample_value("corecontext_" + name, labels)

    assert value("requests_total", outcome="stop") == 3
    assert value("requests_total", outcome="cancelled") == 2
    assert value("tokens_total", kind="prompt") == 26  # read, less those that were cached
    assert value("tokens_total", kind="prompt_cached") == 10
    assert value("tokens_total", kind="made") == 8
    own, none, other = (
        dict(zip(SIZE_NAMES, labels)) for labels in (("4", "8", "0"), ["none"] * 3, ["other"] * 3)
    )
    assert value("settings_total", **own) == 4 and value("settings_total", **none) == 1
    assert value("time_to_first_token_seconds_sum") == 12
    assert value("time_to_first_token_seconds_count") == 3
    assert value("time_per_token_seconds_sum") == 3 and value("time_per_token_seconds_count") == 2
    assert value("queue_length") == 3
    for where, counts in (("cache", [90, 30, 50, 7]), ("host", [180, 4, 11, 5])):
        kinds = ("budget", "used", "allocated", "prefixes")
        assert [value(f"{where}_bytes", what=kind) for kind in kinds] == counts
    assert [value("running", **labels) for labels in (own, other, none)] == [2, 1, 1]


def test_labels_are_sizes_that_the_operator_chose():
    varied = CCAConfig.paper(4, 8, layer_group_sizes=(2, 4))
    fetches = CCAConfig.paper(4, 8, fetch_groups=3)
    plain, own = Request([1], 1), Request([1], 1, window_size=8)
    none = Request([1], 1, fetch_groups=0)
    assert sizes_of(Slot(plain, config=varied)) == (None, 8, 0)
    assert sizes_of(Slot(plain)) == (None, None, None)
    for request, config, by_length, labels in (
        (plain, CONFIG, False, ("4", "8", "0")),
        (plain, fetches, False, ("4", "8", "3")),
        (plain, CONFIG, True, ("other",) * 3),
        (own, CONFIG, False, ("other",) * 3),
        (none, CONFIG, False, ("other",) * 3),
        (own, None, True, ("none",) * 3),
        (plain, varied, False, ("none", "8", "0")),
    ):
        assert labels_of(Slot(request, config=config), by_length) == labels
    for num_groups, policy, by_length in ((3, None, True), (3, "some", False), (None, None, False)):
        config = CCAConfig.paper(window_size=8, num_groups=num_groups)
        scheduler = {"memory": mock.MagicMock(), "waiting": [], "active": list}
        assert gauges(scheduler, policy, config).by_length is by_length


# Answers


def test_an_answer_that_was_cut_off_sends_no_text_that_was_held_back():
    pieces = []

    async def answer():
        answer = Answer(Request([1], 9), TextStream(Letters(), ["st"]), lambda slot: 1 / 0)
        answer.slot = Slot(answer.request, answer.on_token, answer.on_ended)
        answer.on_token(ord("s"))
        with pytest.raises(ZeroDivisionError):
            answer.slot.end_reason = "timeout"
            answer.on_ended(answer.slot)
        async for piece in answer.pieces():
            pieces.append(piece)

    with pytest.raises(RequestError, match="^the request took longer than its time limit"):
        asyncio.run(asyncio.wait_for(answer(), 5))
    assert pieces == []


def test_a_worker_that_stops_cancels_all():
    scheduler = mock.MagicMock(waiting=["a"])
    scheduler.active.return_value = ["b", "c"]
    worker = Worker(scheduler)
    turns = [True, False, False, False, True, False]

    def run_turn():
        worker._stop = len(turns) <= 3
        return turns.pop(0)

    scheduler.run_turn = run_turn
    worker._wake = mock.MagicMock()
    worker._run()
    assert [call.args[0] for call in scheduler.cancel.call_args_list] == ["a", "b", "c"]
    assert turns == [] and not worker.failed
    assert worker._wake.wait.call_count == worker._wake.clear.call_count == 3


# Settings


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"method": "fast"}, "method must be cca or full, got 'fast'"),
        ({"port": -1}, "port must be 0 to 65535, got -1"),
        ({"port": 65536}, "port must be 0 to 65535, got 65536"),
        ({"time_limit_s": 0}, "time-limit must be more than 0 seconds, got 0"),
        ({"time_limit_s": float("inf")}, "time-limit must be"),
        ({"first_token_limit": 0.0}, "first-token-limit must be more than 0 seconds, got 0.0"),
        ({"first_token_limit": float("nan")}, "first-token-limit must be"),
        ({"cache_mib": 0}, "cache-mib must be at least 1, got 0"),
        ({"host_cache_mib": 0}, "host-cache-mib must be at least 1, got 0"),
        ({"max_running": 0}, "max-running must be at least 1, got 0"),
        ({"rows_per_pool": 0}, "rows-per-pool must be at least 1, got 0"),
        ({"chunk_size": 0}, "chunk-size must be at least 1, got 0"),
        ({"max_length": 0}, "max-length must be at least 1, got 0"),
        ({"queue_limit": -1}, "queue-limit must be at least 0, got -1"),
        ({"api_key": ""}, "the API key must be ASCII without spaces, and not empty"),
        ({"api_key": "a b"}, "the API key must be ASCII"),
        ({"api_key": "\u00e9"}, "the API key must be ASCII"),
        *(
            (
                {"method": "full", "settings": {name: value}},
                f"{name.replace('_', '-')} must be left out with method 'full'",
            )
            for name, value in (("group_size", 4), ("core_mass", False), ("sinks", 0))
        ),
    ],
    ids=str,
)
def test_settings_that_break_a_rule_are_refused(settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Serving(**settings)


def test_settings_at_their_bounds_are_taken():
    least = dict.fromkeys(("cache_mib", "max_running", "rows_per_pool", "chunk_size"), 1)
    Serving(port=0, queue_limit=0, max_length=1, time_limit_s=1e-9, **least)
    Serving(port=65535, method="full", api_key="x")
    Serving(settings={"fetch_groups": 2, "store": "host", "fetch_slots": 8})


def test_a_model_has_the_last_part_of_its_path_for_a_name():
    for model, name, expected in (
        (None, None, "corecontext-demo"),
        (None, "x", "x"),
        ("a/b", None, "b"),
        ("a/b/", None, "b"),
        ("a/b", "x", "x"),
        ("/", None, "/"),
    ):
        assert Serving(model, name).model_name == expected
    assert Serving().source == str(BUNDLED) and Serving("a/b").source == "a/b"
