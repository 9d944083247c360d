"""Text that a server sends: its pieces add up to the decoded answer, whatever the tokenizer, and no
stop text is sent."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

pytest.importorskip("fastapi")

from corecontext.serve.ends import Ends
from corecontext.serve.text import HELD_TOKENS, TextStream
from corecontext.serve.token_text import BYTE_OF, TokenText

LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
SPECIAL = ("<|im_end|>", "</s>")
TEXTS = ("a", "é", "你", "😀", "\ufffd", "👩\u200d🚀", "\ufffd\ufffd😀", " .")


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes unknown characters as bytes: like GPT-2's ("level"), or like Llama
    2's, which drops the space before a first word ("fallback"). Tokens 0 to 255 are the bytes."""
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


def random_ids(draw: random.Random, count: int, broken: float = 0.05) -> list[int]:
    """Whole characters, words, special tokens, and a share of bytes that are no character."""
    ids: list[int] = []
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


@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_pieces_add_up_to_the_decoded_answer(kind):
    draw = random.Random(0)
    for _ in range(100):
        prompt = random_ids(draw, draw.choice((0, 1, 9)))
        ids = random_ids(draw, draw.choice((1, 5, 30)))
        # An answer does not lose its text to half a character of its prompt.
        if decoded(kind, prompt).endswith("\ufffd"):
            expected = decoded(kind, ids)
        else:
            expected = decoded(kind, prompt + ids)[len(decoded(kind, prompt)) :]
        pieces, _ = streamed(kind, ids, prompt=prompt)
        assert "".join(pieces) == expected, (prompt, ids)
        assert "".join(streamed(kind, ids, ["no such text"], prompt)[0]) == expected


@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_a_stop_text_ends_the_answer_before_it_special_tokens_included(kind):
    """As `generate` finds stop texts; other special tokens are no part of the text."""
    draw = random.Random(1)
    for _ in range(100):
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
