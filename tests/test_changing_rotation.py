"""Models whose rotation depends on the length of a text give the same numbers by any chunks."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Phi3Config, Qwen2Config

import corecontext
from corecontext import CCAConfig
from corecontext.inference import Engine, prefill
from corecontext.perplexity import document_nll
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler
from corecontext.train.student import make_model, prepare_config
from corecontext.train.teacher import load_teacher
from corecontext.train.train_config import TrainConfig

ORIGINAL = 64
"""Tokens up to which frequencies are the plain ones."""
CCA = CCAConfig.paper(4, 8, core_position="token")
SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip


def model_of(kind: str):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope |= {"original_max_position_embeddings": ORIGINAL}
        config = Phi3Config(
            **SIZES, max_position_embeddings=256, original_max_position_embeddings=ORIGINAL,
            sliding_window=None, rope_parameters=rope,
        )  # fmt: skip
    else:
        config = LlamaConfig(**SIZES, max_position_embeddings=ORIGINAL, rope_parameters=rope)
    return random_model(config)


def random_model(config):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.15)
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 96, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("cca", [False, True], ids=["full", "cca"])
def test_chunks_and_earlier_texts_change_no_number(kind, cca):
    model = model_of(kind)
    if cca:
        corecontext.enable(model, CCA, warn=False)
    text = prompt(200)
    with torch.no_grad():
        whole = model_of(kind)
        if cca:
            corecontext.enable(whole, CCA, warn=False)
        logits = whole(text, use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], text[0, 1:], reduction="none")
    answer = None
    for chunk in (32, ORIGINAL, 200):
        nll = document_nll(model, text, chunk_size=chunk)
        torch.testing.assert_close(nll, expected, rtol=1e-4, atol=1e-4)
        read = prefill(model, text, chunk_size=chunk)
        torch.testing.assert_close(read.logits[0], logits[-1], rtol=1e-4, atol=1e-4)
        # An answer that crosses the original length, after a longer text.
        found = Engine(model, chunk_size=chunk).generate(prompt(58), max_new_tokens=14)
        answer = answer or found
        assert found == answer
    with torch.no_grad():
        assert torch.equal(model(text, use_cache=False).logits[0], logits)


@pytest.mark.parametrize("kind, lengths", [("longrope", (40, 70)), ("dynamic", (70, 80))])
def test_rows_of_other_frequencies_are_refused(kind, lengths):
    model = model_of(kind)
    short, long = map(prompt, lengths)
    ids = torch.cat((torch.nn.functional.pad(short, (lengths[1] - lengths[0], 0)), long))
    mask = torch.ones_like(ids)
    mask[0, : lengths[1] - lengths[0]] = 0
    for read in (prefill, lambda *given: Engine(model).generate(*given[1:], max_new_tokens=1)):
        with pytest.raises(ValueError, match="^rows must be of one length where the rotation"):
            read(model, ids, mask)
    alike = Engine(model).generate(ids[:, -20:], mask[:, -20:], max_new_tokens=2)
    assert alike[1] == Engine(model).generate(ids[1:, -20:], max_new_tokens=2)[0]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_served_answer_does_not_depend_on_its_neighbours(kind):
    def answers(*lengths: int) -> list[list[int]]:
        model = model_of(kind)
        corecontext.enable(model, CCA, warn=False)
        scheduler = Scheduler(model, chunk_size=32)
        found = []
        for length in lengths:
            tokens: list[int] = []
            found.append(tokens)
            scheduler.submit(Request(prompt(length, length)[0].tolist(), 12), tokens.append)
        while not scheduler.idle:
            scheduler.run_turn()
        return found

    alone, together = answers(40)[0], answers(40, 120, 60)
    assert together[0] == alone and len(alone) == 12


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_training_row_does_not_depend_on_its_neighbours(kind, tmp_path):
    model_of(kind).save_pretrained(tmp_path)
    config = TrainConfig(
        model=str(tmp_path), core_position="token", group_size=4, window_size=8, fetch_groups=0,
        context_length=200,
    )  # fmt: skip
    teacher = load_teacher(config, bfloat16=False, device=torch.device("cpu")).model
    for model in (make_model(config, prepare_config(config), bfloat16=False), teacher):
        text = prompt(200)
        with torch.no_grad():
            parts = [model.eval()(text[:, :n], use_cache=False).logits for n in (40, 200, 40)]
        for part in parts[1:]:
            torch.testing.assert_close(part[:, :40], parts[0], rtol=1e-4, atol=1e-4)


def test_sliding_windows_are_kept_whatever_layer_is_first():
    """A cache without a config takes the sizes of all masks from its first layer."""
    types = ["full_attention", "sliding_attention"]
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, layer_types=types)
    model = random_model(config)
    text = prompt(40)
    for cca in (None, CCA.replace(core_position="middle")):
        if cca is not None:
            corecontext.enable(model, cca, warn=False)
        with torch.no_grad():
            expected = model(text, use_cache=False).logits[:, 30:]
            for cache in (DynamicCache(config=model.config), DynamicCache()):
                model(text[:, :30], past_key_values=cache)
                steps = [model(x, past_key_values=cache).logits for x in text[:, 30:].split(1, 1)]
                torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-4)
