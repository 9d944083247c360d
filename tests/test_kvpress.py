"""Contexts that kvpress compresses: answers are those of its own pipeline. Runs where kvpress is
installed, in an environment of its own (reproduction/rivals/press.py)."""

import importlib

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress needs transformers < 5.3, in an environment of its own"
)
rivals_press = importlib.import_module("reproduction.rivals.press")
rivals_tasks = importlib.import_module("reproduction.rivals.tasks")

LETTERS = "abcdefghijklmnopqrstuvwxyz"


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


def near(x, y, atol=1e-9):
    torch.testing.assert_close(x, y, rtol=0, atol=atol)


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
