"""Log-probabilities, echo and several prompts over HTTP, as in OpenAI's protocol: a program such as
lm-evaluation-harness scores texts with them."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from served import Asgi
from tiny_model import save_tiny_model

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from corecontext.serve.logprobs import add_logprobs  # noqa: E402
from corecontext.serve.token_text import TokenText  # noqa: E402

TEXT = "The sea was calm; na\u00efve \U0001f600 gulls sat on it and slept all day."
SCORED = {"temperature": 0, "echo": True, "logprobs": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"), max_length=512)
    served = Asgi(folder, chunk_size=16)
    yield served
    served.worker.stop()


def scores(tiny, ids: list[int]) -> torch.Tensor:
    """Return log-probabilities [tokens - 1, vocabulary] of the next token by one pass."""
    with torch.no_grad():
        return tiny.loaded.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)


def test_a_prompt_and_its_answer_have_the_log_probabilities_of_one_pass(tiny):
    ids = tiny.loaded.tokenizer(TEXT)["input_ids"]
    plain = tiny.complete(prompt=TEXT, max_tokens=6, temperature=0, ignore_eos=True)
    assert len(ids) > 3 * 16  # its first chunks are in the prefix store now
    whole = tiny.complete(prompt=TEXT, max_tokens=6, **SCORED).json()
    choice = whole["choices"][0]
    assert choice["text"] == TEXT + plain.json()["choices"][0]["text"]
    found = choice["logprobs"]
    assert {len(values) for values in found.values()} == {len(ids) + 6}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    text = TokenText(tiny.loaded.tokenizer).text
    numbers = {text(token)[1]: token for token in range(256)}
    made = [numbers[raw_bytes(name)] for name in found["tokens"]]
    assert made[: len(ids)] == ids
    expected = scores(tiny, made)
    chosen = expected.gather(-1, torch.tensor(made[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:]), chosen, atol=1e-4, rtol=0)
    for row, top, name in zip(expected, found["top_logprobs"][1:], found["tokens"][1:]):
        assert name in top and 3 <= len(top) <= 4
        best = sorted(top.values(), reverse=True)[:3]
        torch.testing.assert_close(torch.tensor(best), row.topk(3).values, atol=1e-4, rtol=0)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def raw_bytes(name: str) -> bytes:
    """Return the bytes of a token as the protocol writes it."""
    if name.startswith("bytes:"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


def test_tokens_stand_at_their_offsets(tiny):
    choice = tiny.complete(prompt=TEXT, max_tokens=0, **SCORED).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    for name, offset in zip(found["tokens"], found["text_offset"]):
        assert name.startswith("bytes:") or TEXT[offset : offset + len(name)] == name
    parts = [i for i, name in enumerate(found["tokens"]) if name.startswith("bytes:")]
    assert len(parts) == 2 + 4
    assert [found["text_offset"][i] for i in parts[:2]] == [TEXT.index("\u00ef")] * 2
    # Without echo, too, offsets count from the beginning of the prompt.
    alone = tiny.complete(prompt="abc", max_tokens=3, temperature=0, logprobs=0, ignore_eos=True)
    found = alone.json()["choices"][0]["logprobs"]
    assert found["text_offset"][0] == 3 and found["top_logprobs"] == [None] * 3


def test_reading_a_prompt_alone_makes_no_token(tiny):
    whole = tiny.complete(prompt="abc", max_tokens=0, echo=True).json()
    assert whole["choices"][0]["text"] == "abc" and whole["choices"][0]["logprobs"] is None
    assert whole["usage"]["completion_tokens"] == 0
    assert tiny.scheduler.idle and tiny.scheduler.memory.used == 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_get_the_answers_of_each_alone(tiny, stream):
    prompts = [TEXT[:9], TEXT, TEXT[5:30]]
    alone = [tiny.complete(prompt=text, max_tokens=5, **SCORED).json() for text in prompts]
    asked = {"max_tokens": 5, **SCORED, "stream": stream}
    numbers = [tiny.loaded.tokenizer(text)["input_ids"] for text in prompts]
    for batch in (prompts, numbers):
        if not stream:
            found = tiny.complete(prompt=batch, **asked).json()
            assert found["usage"]["prompt_tokens"] == sum(map(len, numbers))
            assert found["usage"]["completion_tokens"] == 15
            choices = found["choices"]
        else:
            choices = streamed(tiny.complete(prompt=batch, **asked).text)
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for choice, one in zip(choices, alone):
            expected = one["choices"][0]
            assert choice["text"] == expected["text"]
            assert choice["finish_reason"] == expected["finish_reason"]
            for name, values in expected["logprobs"].items():
                if name == "token_logprobs":
                    assert choice["logprobs"][name][1:] == pytest.approx(values[1:], abs=1e-4)
                elif name != "top_logprobs":
                    assert choice["logprobs"][name] == values


def streamed(text: str) -> list[dict]:
    """Put the pieces of each choice together."""
    choices: dict[int, dict] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for piece in json.loads(line.removeprefix("data: "))["choices"]:
            choice = choices.setdefault(
                piece["index"], {"index": piece["index"], "text": "", "logprobs": {}}
            )
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    return [choices[index] for index in sorted(choices)]


def test_one_prompt_that_cannot_run_refuses_all(tiny):
    response = tiny.complete(prompt=["abc", "abcdefgh" * 70], max_tokens=5)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert tiny.complete(max_tokens=1).status_code == 200 and tiny.scheduler.idle


def test_tokens_behind_a_stop_text_are_left_out(tiny):
    asked = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    whole = tiny.complete(**asked).json()["choices"][0]
    stop = whole["text"][5:7]
    found = tiny.complete(**asked, stop=stop).json()["choices"][0]
    cut = whole["text"].index(stop)
    assert found["finish_reason"] == "stop" and found["text"] == whole["text"][:cut]
    offsets = found["logprobs"]["text_offset"]
    assert offsets == [x for x in whole["logprobs"]["text_offset"] if x < len(TEXT) + cut]


def test_an_end_of_text_token_has_its_log_probability(tiny):
    """Else programs that leave out the last token would leave out one of the prompt."""
    ids = tiny.loaded.tokenizer("abc")["input_ids"]
    with torch.no_grad():
        token = int(tiny.loaded.model(torch.tensor([ids])).logits[0, -1].argmax())
    service = tiny.app.state.service
    before = service.ends
    service.ends = dataclasses.replace(before, tokens=frozenset([token]))
    try:
        found = tiny.complete(prompt="abc", max_tokens=1, temperature=0, echo=True, logprobs=1)
    finally:
        service.ends = before
    choice = found.json()["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == 4


def test_neighbours_get_as_many_likely_tokens_as_each_asked_for():
    slots = [
        SimpleNamespace(request=SimpleNamespace(logprobs=count), logprobs=[])
        for count in (None, 0, 1, 3)
    ]
    add_logprobs(slots, torch.eye(4, 7), [1, 2, 3, 4])
    found = [[len(record.top) for record in slot.logprobs] for slot in slots]
    assert found == [[], [0], [1], [3]]


def test_cached_tokens_are_those_of_all_prompts(tiny):
    tiny.complete(prompt=TEXT, max_tokens=1)
    counts = []
    for prompt in (TEXT, ["abc", TEXT], [TEXT, TEXT]):
        usage = tiny.complete(prompt=prompt, max_tokens=1).json()["usage"]
        counts.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] > 0 and counts == [counts[0], counts[0], 2 * counts[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_chats_have_log_probabilities(tiny, stream):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": stream,
        "ignore_eos": True,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    response = tiny.ask(("POST", "/v1/chat/completions", {"json": body}))[0]
    assert response.status_code == 200, response.text
    if stream:
        lines = response.text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        entries = []
        for event in events:
            entries += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert bytes(entry["bytes"]) == raw_bytes_of_chat(entry["token"])
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # the likeliest is taken


def raw_bytes_of_chat(token: str) -> bytes:
    if token.startswith("\\x"):
        return bytes.fromhex(token.replace("\\x", ""))
    return token.encode()


def test_the_requests_of_lm_evaluation_harness(tiny):
    """As its model `local-completions` sends them for loglikelihood, and reads the answer."""
    pairs = [("The sea was", " calm"), ("gulls sat", " on it"), ("a", "b")]
    tokenize = tiny.loaded.tokenizer
    contexts = [tokenize(context)["input_ids"] for context, _ in pairs]
    wholes = [tokenize(context + rest)["input_ids"] for context, rest in pairs]
    out = tiny.complete(
        prompt=wholes, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    ).json()
    for choice, context, whole in zip(out["choices"], contexts, wholes):
        found = sum(choice["logprobs"]["token_logprobs"][len(context) : -1])
        rows = scores(tiny, whole)[len(context) - 1 :]
        expected = rows.gather(-1, torch.tensor(whole[len(context) :])[:, None]).sum()
        assert found == pytest.approx(float(expected), abs=1e-3)
        greedy = all(
            token == max(top.values())
            for token, top in zip(
                choice["logprobs"]["token_logprobs"][len(context) : -1],
                choice["logprobs"]["top_logprobs"][len(context) : -1],
            )
        )
        assert greedy == bool((rows.argmax(-1) == torch.tensor(whole[len(context) :])).all())


def test_a_logarithm_of_zero_can_be_sent(tiny, monkeypatch):
    head = tiny.loaded.model.lm_head.forward

    def masked(hidden):
        logits = head(hidden)
        logits[..., 7] = -math.inf
        return logits

    monkeypatch.setattr(tiny.loaded.model.lm_head, "forward", masked)
    response = tiny.complete(prompt=[5, 7, 9], max_tokens=0, echo=True, logprobs=1)
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"][1] == -9999.0
