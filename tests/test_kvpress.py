"""Core tokens as a press of kvpress: its own pipeline decodes from them. Runs where kvpress is
installed, in an environment of its own (reproduction/cca_press.py)."""

import importlib

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.integrations.hf.cache_name import given_cache

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress needs transformers < 5.3, in an environment of its own"
)
CCAPress = importlib.import_module("reproduction.cca_press").CCAPress
rivals_press = importlib.import_module("reproduction.rivals.press")
rivals_tasks = importlib.import_module("reproduction.rivals.tasks")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONTEXT = "the quick brown fox jumps over the lazy dog and the cat".replace(" ", "") * 2
CONFIG = CCAConfig.pooling(4, 9, sink_size=4, core_mass=False)


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
        CCAPress(CCAConfig.pooling(1, 9, core_mass=False)),
        CCAPress(CCAConfig.pooling(4, 500, core_mass=False)),
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
                core_position=self.config.core_position,
                rotary=self.rotary,
                scale=scaling,
            )
            outs.append(out[:, :, -1:])
        return torch.cat(outs, 2).transpose(1, 2), None


@pytest.mark.parametrize(
    "changes",
    [{}, {"core_position": "token"}, {"sink_size": 0, "group_size": 3}],
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
        cache = cache or given_cache(kwargs).layers[0].keys.shape[2]

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
        CCAPress(CCAConfig.pooling(cache_dtype="int8", core_mass=False))
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


CELLS = [rivals_tasks.Cell("full", 1)]
CELLS += [rivals_tasks.Cell(name, n) for name in rivals_press.PRESSES for n in (4, 2)]


@pytest.fixture(scope="module")
def pressed(pipeline, tmp_path_factory):
    """All presses at two compressions."""
    folder = tmp_path_factory.mktemp("tokenizer")
    pipeline.model.config.name_or_path = str(folder)  # where KVzip looks for the tokenizer
    pipeline.model.config.save_pretrained(folder)
    pipeline.tokenizer.save_pretrained(folder)
    return rivals_press.PressRun(Kept(pipeline), CELLS)


def long_item(answer):
    """A context of 300 tokens, a question of 4, and an answer."""
    ids = [0, *((7 * i * i + i // 3) % 26 for i in range(302)), 0, *answer]
    return rivals_tasks.Item(ids, 300, (slice(304, 304 + len(answer)),))


def decoded(pipeline, cell, question):
    """The logits of 12 tokens in kvpress's pipeline, which reads the context for one press and
    decodes token by token."""
    press = None if cell.method == "full" else rivals_press.PRESSES[cell.method](1 - 1 / cell[1])
    text = "".join(LETTERS[i] for i in long_item([]).ids)
    logits = []
    hook = pipeline.model.register_forward_hook(
        lambda module, args, output: logits.append(output.logits[0, -1])
    )
    try:
        pipeline(text[1:question], question=text[question:303], press=press, max_new_tokens=12)
    finally:
        hook.remove()
    return torch.stack(logits[-12:])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.method}-{cell.compression}")
def test_presses_that_share_a_context_answer_as_in_the_pipeline_of_kvpress(pipeline, pressed, cell):
    question = 300
    atol = 1e-9
    if cell.method == "kvzip":
        pipeline.model.float()  # its mask has no float64
        atol = 1e-4
    if cell == ("pyramidkv", 2):
        # The pipeline gives all layers the first one's mask, though they keep different numbers of
        # entries: a question of one token needs none.
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            decoded(pipeline, cell, question)
        question = 303
    expected = decoded(pipeline, cell, question)
    item = long_item(expected.argmax(-1).tolist())._replace(question=question)
    contexts, logits = pressed.read(item)
    read = [key for key, context in contexts.items() if not isinstance(context, Exception)]
    near(logits[read.index(cell)], expected, atol)
    answer = pressed.ask(item)[cell]
    assert item.share_right(answer.choices) == 1
    whole = 2 * 2 * 2 * 16 * question * expected.element_size()
    assert answer.sizes["device_bytes"] >= answer.sizes["kept_bytes"]
    assert 0.9 * whole < cell.compression * answer.sizes["kept_bytes"] <= 1.02 * whole
    assert pressed.first_token(cell, item) == answer.sizes
    pipeline.model.double()


def test_a_press_that_fails_leaves_the_others(pipeline, pressed):
    """SnapKV needs more than its window of 64 tokens."""
    item = rivals_tasks.Item([*range(26), *range(26)], 48, (slice(50, 52),))
    answers = pressed.ask(item)
    failed = {cell.method for cell, answer in answers.items() if isinstance(answer, Exception)}
    assert "snapkv" in failed and {"full", "knorm"}.isdisjoint(failed)
    logits = pipeline.model(torch.tensor([item.ids])).logits[0, 49:51]
    assert answers["full", 1].choices == logits.argmax(-1).tolist()
    right = torch.tensor(item.ids[50:])
    assert answers["full", 1].nll == pytest.approx(float(cross_entropy(logits, right)))
