"""Text that a server sends: its pieces add up to the decoded answer, whatever the tokenizer, and no
stop text is sent. `pytest tests/test_serve_text.py --fuzz 1000 --first 5000 -n 0` draws more texts,
from a number on.
"""

import functools
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from served import Asgi
from tiny_model import save_tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytest.importorskip("fastapi")

from corecontext.serve.ends import Ends
from corecontext.serve.settings import BUNDLED
from corecontext.serve.text import HELD_TOKENS, TextStream
from corecontext.serve.token_text import BYTE_OF, TokenText

LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
SPECIAL = ("<|im_end|>", "</s>")
TEXTS = ("a", "é", "你", "😀", "\ufffd", "👩\u200d🚀", "\ufffd\ufffd😀", " .")


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes unknown characters as bytes: like GPT-2's ("level"), or like Llama
    2's, which drops the space before a first word ("fallback"), whose tokens 0 to 255 are the
    bytes; or that of the bundled model."""
    if kind == "bundled":
        return AutoTokenizer.from_pretrained(BUNDLED)
    if kind == "level":
        names = [*(LETTER_OF[byte] for byte in range(256)), "Ġthe", "Ġsea", "ï¿½", "ðŁ"]
        decoder = decoders.ByteLevel()
    else:
        names = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁sea", "calm", "▁"]
        words = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
        decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)])
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    inner.decoder = decoder
    inner.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def decoded(kind: str, ids: list[int], special: bool = False) -> str:
    return tokenizer_of(kind).decode(
        ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )


def random_ids(draw: random.Random, count: int, broken: float = 0.05, kind: str = "") -> list[int]:
    """Whole characters, words, special tokens, and a share of bytes that are no character; of the
    bundled tokenizer any tokens."""
    ids: list[int] = []
    if kind == "bundled":
        tokenizer = tokenizer_of(kind)
        while len(ids) < count:
            ids += tokenizer(draw.choice(TEXTS))["input_ids"]
            ids += draw.choices(range(len(tokenizer)), k=draw.randint(0, 3))
        return ids
    while len(ids) < count:
        kind = draw.random()
        if kind < 0.6:
            ids += draw.choice(TEXTS).encode()
        elif kind < 0.9:
            ids.append(draw.randrange(256, 260))
        elif kind < 1 - broken:
            ids.append(draw.randrange(260, 262))
        else:
            ids.append(draw.randrange(128, 256))
    return ids


def streamed(kind: str, ids: list[int], stops=(), prompt=()) -> tuple[list[str], bool]:
    """The pieces of an answer, and whether a stop text ended it."""
    stream = TextStream(tokenizer_of(kind), stops, prompt)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.end()], stream.stopped


def texts(request, case: str, least: int = 100) -> Iterator[random.Random]:
    """What each text of a test is drawn from."""
    first = request.config.getoption("--first")
    for number in range(first, first + max(least, request.config.getoption("--fuzz"))):
        yield random.Random(f"{case} {number}")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["level", "fallback", "bundled"])
def test_pieces_add_up_to_the_decoded_answer(kind, request, record_check):
    count = 0
    for draw in texts(request, f"text {kind}"):
        count += 1
        prompt = random_ids(draw, draw.choice((0, 1, 9)), kind=kind)
        # In a run of more bytes than are held, one that is invalid comes too late for the first.
        length, broken = draw.choice(((1, 0.05), (5, 0.05), (30, 0.05), (200, 0.0)))
        ids = random_ids(draw, length, broken, kind)
        # An answer does not lose its text to half a character of its prompt.
        if decoded(kind, prompt).endswith("\ufffd"):
            expected = decoded(kind, ids)
        else:
            expected = decoded(kind, prompt + ids)[len(decoded(kind, prompt)) :]
        pieces, _ = streamed(kind, ids, prompt=prompt)
        assert "".join(pieces) == expected, (prompt, ids)
        assert "".join(streamed(kind, ids, ["no such text"], prompt)[0]) == expected
    first = request.config.getoption("--first")
    command = f"python -m pytest tests/test_serve_text.py -n 0 --fuzz {count} --first {first}"
    record_check(command, check="served text", tokenizer=kind, cases=count)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_a_stop_text_ends_the_answer_before_it_special_tokens_included(kind, request):
    """As `generate` finds stop texts; other special tokens are no part of the text."""
    for draw in texts(request, f"stop {kind}"):
        ids = [*b"a", *random_ids(draw, 30, broken=0)]
        whole = decoded(kind, ids, special=True)
        stop = draw.choice(
            ("<|im_end|>", "<|im_end|>a", "a</s>", " .", "sea", "é你", "你</s><|im_end|>")
        )
        shown = whole
        for text in SPECIAL:
            if text not in stop:
                shown = shown.replace(text, "")
        before, found, _ = shown.partition(stop)
        for text in SPECIAL:
            before = before.replace(text, "")
        pieces, stopped = streamed(kind, ids, ["no such text", stop])
        assert stopped == bool(found), (stop, ids)
        assert "".join(pieces) == before, (stop, ids)


@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_text_is_sent_as_soon_as_it_is_certain_and_little_is_decoded_again(kind):
    stream = TextStream(tokenizer_of(kind))
    the, special, broken = 256, 260, 0x80
    assert [stream.push(the) for _ in range(3)] == [decoded(kind, [the]), " the", " the"]
    for token, sent in ((special, 0), (broken, 3 * HELD_TOKENS), (0xE9, 3 * HELD_TOKENS)):
        text = "".join(stream.push(token) for _ in range(5 * HELD_TOKENS))
        assert text.count("\ufffd") >= sent and len(stream._ids) <= 2 * HELD_TOKENS
    # A text without a word between its characters does not wait for its end.
    characters = "你" * HELD_TOKENS
    stream = TextStream(tokenizer_of(kind))
    text = "".join(map(stream.push, characters.encode()))
    assert len(text) > HELD_TOKENS / 2 and text + stream.end() == characters


@pytest.mark.timeout(0)
def test_a_served_answer_is_the_text_of_its_tokens(request, tmp_path, monkeypatch):
    """Of random bytes, streamed and whole."""
    server = Asgi(save_tiny_model(tmp_path))
    tokens: list[int] = []
    push = TextStream.push
    monkeypatch.setattr(
        TextStream, "push", lambda stream, token: tokens.append(token) or push(stream, token)
    )
    for draw in texts(request, "served", least=3):
        prompt = random_ids(draw, draw.randint(1, 9), kind="")
        prompt = [token % 256 for token in prompt]
        body = {"prompt": prompt, "max_tokens": draw.randint(1, 90), "temperature": 2.0, "seed": 5}
        tokens.clear()
        whole = server.complete(**body).json()["choices"][0]["text"]
        lines = server.complete(**body, stream=True).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        pieces = [x["text"] for event in events for x in event["choices"]]
        ids = tokens[: len(tokens) // 2]
        assert tokens == ids * 2
        before = server.loaded.tokenizer.decode(prompt)
        before = "" if before.endswith("\ufffd") else before
        known = prompt if before else []
        assert (
            whole == "".join(pieces) == server.loaded.tokenizer.decode(known + ids)[len(before) :]
        )
    server.worker.stop()


def test_special_tokens_take_no_characters_of_a_text():
    """Also those that the tokenizer's settings do not name."""
    texts = TokenText(tokenizer_of("level"))
    assert texts.length([257, 260, *b"ab"]) == len(" seaab")


@pytest.mark.parametrize(
    "eos, eos_token, template, ends, chat_ends",
    [
        (5, None, None, {5}, {5}),
        ([5, 0], "</s>", None, {5, 0, 261}, {5, 0, 261}),
        (5, "</s>", "{c}<|im_end|>", {5, 261}, {5, 261, 260}),
        (None, None, "{c}\n<|im_end|></s>\n", set(), {260}),
        (None, None, "{c}the", set(), set()),
        (None, None, "{{{{ raise_exception('no') }}}}", set(), set()),
    ],
)
def test_answers_end_at_the_tokens_of_the_model_its_tokenizer_and_its_template(
    eos, eos_token, template, ends, chat_ends
):
    """vLLM stops at the tokenizer's, too; a chat's answer is over where its template ends it."""
    inner = tokenizer_of("level").backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos_token)
    if template:
        content = template.format(c="{{ m.content }}")
        tokenizer.chat_template = "{% for m in messages %}" + content + "{% endfor %}"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))
    found = Ends.of(model, tokenizer)
    assert (found.tokens, found.chat_tokens) == (ends, chat_ends)
    assert found.added == tuple(SPECIAL[token - 260] for token in sorted(chat_ends) if token > 259)
