"""Core tokens as a press of kvpress: its own pipeline decodes from them. Runs where kvpress is
installed, in an environment of its own (corecontext/integrations/kvpress.py)."""

from __future__ import annotations

import importlib

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from corecontext import CCAConfig, Rotary, cca_attention

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress needs transformers < 5.3, in an environment of its own"
)
CCAPress = importlib.import_module("corecontext.integrations.kvpress").CCAPress
rivals_press = importlib.import_module("reproduction.rivals_press")
rivals_tasks = importlib.import_module("reproduction.rivals_tasks")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONTEXT = "the quick brown fox jumps over the lazy dog and the cat".replace(" ", "") * 2
CONFIG = CCAConfig(4, 9, sink_size=4, core_mass=False)


@pytest.fixture(scope="module")
def pipeline():
    """kvpress's own pipeline, of a tiny random Llama in float64 and a tokenizer of letters."""
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.data *= 2  # else all tokens are about as likely
    words = Tokenizer(models.WordLevel({x: i for i, x in enumerate(LETTERS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="a")
    return kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)


def run(pipeline, press=None, question="why"):
    """The answer, and the logits of all calls."""
    logits = []
    hook = pipeline.model.register_forward_hook(
        lambda module, args, output: logits.append(output.logits[0, -1])
    )
    try:
        out = pipeline(CONTEXT, question=question, press=press, max_new_tokens=12)
    finally:
        hook.remove()
    return out["answer"], torch.stack(logits)


def near(x, y, atol=1e-9):
    torch.testing.assert_close(x, y, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "press",
    [
        CCAPress(CONFIG, compression_ratio=0),
        CCAPress(CCAConfig(1, 9, core_mass=False)),
        CCAPress(CCAConfig(4, 500, core_mass=False)),
    ],
    ids=["ratio 0", "g = 1", "within the window"],
)
def test_full_attention(pipeline, press):
    answer, logits = run(pipeline)
    pressed, pressed_logits = run(pipeline, press)
    assert pressed == answer
    near(pressed_logits, logits)


class Definition:
    """CCA of all tokens for queries after the prompt, whose window grows, in one dense pass for
    each: registered as an attention of transformers."""

    def __init__(self, config, prompt, rotary):
        self.config = config
        self.prompt = prompt
        self.rotary = rotary
        self.queries = {}

    def __call__(self, module, query, key, value, mask, dropout=0.0, scaling=None, **options):
        layer = module.layer_idx
        length = key.shape[2]
        if query.shape[2] == length:
            self.queries[layer] = query
            out = cca_attention(
                query, key, value, group_size=1, core_position="token", scale=scaling
            )
            return out.transpose(1, 2), None
        queries = torch.cat((self.queries[layer], query), 2)
        self.queries[layer] = queries
        outs = []
        for end in range(length - query.shape[2] + 1, length + 1):
            out = cca_attention(
                *(x[:, :, :end] for x in (queries, key, value)),
                group_size=self.config.group_size,
                window_size=self.config.window_size + end - 1 - self.prompt,
                sink_size=self.config.sink_size,
                pooling=self.config.pooling,
                core_position=self.config.core_position,
                rotary=self.rotary,
                scale=scaling,
            )
            outs.append(out[:, :, -1:])
        return torch.cat(outs, 2).transpose(1, 2), None


@pytest.mark.parametrize(
    "changes",
    [{}, {"core_position": "token", "pooling": "mean"}, {"sink_size": 0, "group_size": 3}],
    ids=str,
)
def test_the_pipeline_decodes_from_the_dense_definition(pipeline, changes):
    config = CONFIG.replace(**changes)
    press = CCAPress(config)
    answer, logits = run(pipeline, press)
    assert run(pipeline)[0] != answer
    prompt = len(CONTEXT) + 1
    definition = Definition(config, prompt, Rotary.from_theta(10000.0, 16))
    ALL_ATTENTION_FUNCTIONS["cca_definition"] = definition
    pipeline.model.config._attn_implementation = "cca_definition"
    try:
        expected, expected_logits = run(pipeline)
    finally:
        pipeline.model.config._attn_implementation = "sdpa"
        del ALL_ATTENTION_FUNCTIONS["cca_definition"]
    assert answer == expected
    near(logits, expected_logits, atol=1e-6)  # the model's frequencies are in float32


def test_entries_are_as_many_as_the_ratio_allows(pipeline):
    for ratio in (0.1, 0.5, 0.75):
        for length in (111, 1000):
            sizes = CCAPress(CONFIG, compression_ratio=ratio).sizes(length)
            most = int(length * (1 - ratio))
            assert most - sizes.group_size < sizes.entries(length) - 1 < most
            # What stays raw at the end is a window.
            rest = length - sizes.sinks - sizes.cores * sizes.group_size
            assert rest >= most // 4 and sizes.group_size >= 4
    cache = None

    def keep(module, args, kwargs, output):
        nonlocal cache
        cache = cache or kwargs["past_key_values"].layers[0].keys.shape[2]

    hook = pipeline.model.model.layers[1].register_forward_hook(keep, with_kwargs=True)
    try:
        run(pipeline, CCAPress(CONFIG, compression_ratio=0.5))
    finally:
        hook.remove()
    assert cache == CCAPress(CONFIG, 0.5).sizes(len(CONTEXT) + 1).entries(len(CONTEXT) + 1) <= 44


def test_refusals(pipeline):
    with pytest.raises(NotImplementedError, match="core_mass must be False in a press, got True"):
        CCAPress(CCAConfig())
    with pytest.raises(NotImplementedError, match="cache_dtype must be 'auto' in a press"):
        CCAPress(CCAConfig(cache_dtype="int8", core_mass=False))
    for ratio in (-0.1, 1.0):
        with pytest.raises(ValueError, match="compression_ratio must be at least 0 and below 1"):
            CCAPress(compression_ratio=ratio).sizes(100)
    with pytest.raises(ValueError, match="must leave room for first tokens and window, got 0.9"):
        CCAPress(compression_ratio=0.9).sizes(100)
    ids = torch.tensor([[1, 2, 3] * 9] * 2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with CCAPress(CONFIG)(pipeline.model), pytest.raises(ValueError, match="must have no padding"):
        pipeline.model(ids, attention_mask=mask)


class Kept:
    """A model and its tokenizer, as `PressRun` takes them."""

    def __init__(self, pipeline):
        self.model = pipeline.model
        self.tokenizer = pipeline.tokenizer


def long_item(ending):
    """A context of 300 tokens, a question of 10, and an answer of 100 with this ending."""
    ids = [(7 * i * i + i // 3) % 26 for i in range(410)]
    ids[-len(ending) :] = ending
    return rivals_tasks.Item(ids, 300, (slice(310, 410),))


# The others need a tokenizer in a folder, or heads too large for this model.
NAMES = [name for name in rivals_press.PRESSES if name not in ("adakv", "kvzip")]


@pytest.mark.parametrize("name", ["full", *NAMES])
def test_a_given_answer_is_read_as_greedy_decoding_would(pipeline, name):
    """No token sees those after it, also in presses whose layers keep different numbers of
    entries."""
    run = rivals_press.PressRun(Kept(pipeline), name, 4)
    logits, sizes = run.ask(long_item([1, 2]))
    again, _ = run.ask(long_item([3] * 40))
    near(again[:60], logits[:60])
    first, _ = run.ask(long_item([1]), first=True)
    near(first, logits[:1])
    assert sizes["device_bytes"] >= sizes["kept_bytes"]
    whole = 2 * 2 * 2 * 16 * 300 * 8
    share = 1 if name == "full" else 4
    assert whole / share - 8 * 1024 < sizes["kept_bytes"] <= 1.02 * whole / share


def test_a_press_answers_as_in_its_own_pipeline(pipeline):
    run = rivals_press.PressRun(Kept(pipeline), "snapkv", 4)
    item = long_item([1])
    text = "".join(LETTERS[i] for i in item.ids)
    own = pipeline(text[1:300], question=text[300:309], press=run.press, max_new_tokens=20)[
        "answer"
    ].replace(" ", "")
    ids = [*item.ids[:309], 0, *(LETTERS.index(letter) for letter in own)]
    ids[0] = 0
    logits, _ = run.ask(item._replace(ids=ids, parts=(slice(310, 330),)))
    assert "".join(LETTERS[i] for i in logits.argmax(-1)) == own
