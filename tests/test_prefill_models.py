"""Models whose prompts full attention reads: every way of generating, the engine, the server's
scheduler, evaluation and the command line."""

import pytest
import torch
from families import tiny_model, tokens

import corecontext
from corecontext import CCAConfig
from corecontext.eval.subject import ModelSubject
from corecontext.inference import Engine, prefill
from corecontext.inference.limits import cache_bytes_per_token
from corecontext.integrations.hf import layer_call as hf_call
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.loading import Loaded
from corecontext.model_sizes import ModelSizes
from corecontext.ops.fetch import prompt_rule
from corecontext.perplexity import document_nll
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler
from reproduction.suites.choices import choose

pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.pooling(4, 9, sink_size=4, core_mass=True, prefill="full")
NEW = 14


@pytest.fixture(autouse=True)
def steps_choose(monkeypatch):
    """Let no step read all raw tokens."""
    monkeypatch.setattr(prompt_rule, "STEP_LENGTHS", {})


def defined(monkeypatch, model, ids, prompt):
    """Logits of the definition, from one pass without a cache: full attention for positions
    before `prompt`, the settings for later ones."""
    attend = hf_call.attend

    def mixed(inputs, spec, ragged, backend):
        length = inputs.q.shape[2]
        full = attend(inputs, spec.replace(window_size=length, fetch_groups=0), ragged, backend)
        compact = attend(inputs, spec, ragged, backend)
        return torch.cat((full[0][:, :, :prompt], compact[0][:, :, prompt:]), 2), None

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(hf_call, "attend", mixed)
        return model(ids, use_cache=False).logits


def is_greedy(monkeypatch, model, prompt, new):
    """Whether the new tokens, a list, are the likeliest ones by the definition."""
    ids = torch.cat((prompt, torch.tensor([new])), 1)
    logits = defined(monkeypatch, model, ids[:, :-1], prompt.shape[1])
    return logits[0, prompt.shape[1] - 1 :].argmax(-1).tolist() == new


@pytest.mark.parametrize(
    "settings", [{}, {"fetch_groups": 2, "fetch_index": "mean"}, {"head_group_sizes": (4, 3)}]
)
def test_steps_are_those_of_the_dense_definition(monkeypatch, settings):
    model, ids = tiny_model().double(), tokens(2, 60)
    with torch.no_grad():
        full = model(ids[:, :41], output_hidden_states=True).hidden_states
    with corecontext.enabled(model, CONFIG.replace(**settings)), torch.no_grad():
        truth = defined(monkeypatch, model, ids, 41)
        out = model(ids[:, :41], use_cache=True, output_hidden_states=True)
        for x, y in zip(out.hidden_states, full, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        logits = [out.logits]
        for position in range(41, 60):
            token = ids[:, position : position + 1]
            logits.append(model(token, **with_cache(returned_cache(out))).logits)
        torch.testing.assert_close(torch.cat(logits, 1), truth, rtol=0, atol=1e-10)
        # The prompt in chunks, the last of one token.
        read = prefill(model, ids[:, :41], chunk_size=8)
        torch.testing.assert_close(read.logits, truth[:, 40], rtol=0, atol=1e-10)
        assert cache_bytes(read.cache) <= cache_bytes(returned_cache(out))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 5},
        {"prompt_lookup_num_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", [{}, {"fetch_groups": 2, "fetch_index": "mean"}], ids=str)
def test_generate_is_the_definition(monkeypatch, settings, options):
    model, ids = tiny_model(), tokens(1, 37)
    ids[:, 20:30] = ids[:, 5:15]  # something for prompt lookup to find
    with corecontext.enabled(model, CONFIG.replace(**settings)):
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
        assert is_greedy(monkeypatch, model, ids, out[0, 37:].tolist())


def test_the_definition_is_neither_attention(monkeypatch):
    model, ids = tiny_model(), tokens(1, 60)
    with corecontext.enabled(model, CONFIG), torch.no_grad():
        mixed = defined(monkeypatch, model, ids, 41)[:, 50:]
        for prompt in (0, 60):
            other = defined(monkeypatch, model, ids, prompt)[:, 50:]
            assert (mixed - other).abs().max() > 1e-3


@pytest.mark.parametrize("static", [False, True])
def test_the_engine_is_the_definition_alone_and_beside_others(monkeypatch, static):
    model, ids = tiny_model(), tokens(2, 37)
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    with corecontext.enabled(model, CONFIG):
        engine = Engine(model, static=static, chunk_size=9)  # 37 = 4 x 9 + 1
        together = engine.generate(ids, mask, max_new_tokens=NEW)
        for row, new in zip((ids[:1], ids[1:, 12:]), together):
            assert is_greedy(monkeypatch, model, row, new)
        assert Engine(model, static=static).generate(ids, mask, max_new_tokens=NEW) == together
        assert engine.generate(ids[1:, 12:], max_new_tokens=NEW) == together[1:]
        assert engine.cache_bytes_used == 0


def test_a_server_reads_alike_shares_no_beginnings_and_counts_raw_tokens(monkeypatch):
    model, ids = tiny_model(), tokens(1, 161)[0]
    with corecontext.enabled(model, CONFIG):
        shape = Scheduler(model).memory.shape
        row, raw = shape.row_bytes(CONFIG, 192), shape.row_bytes(None, 192)
        budget = 2 * row + raw
        for room, together in ((budget, 1), (4 * budget, 2)):
            scheduler = Scheduler(model, chunk_size=40, cache_bytes=room)
            answers = [[], []]
            for answer in answers:
                scheduler.submit(Request(ids.tolist(), 8), answer.append)
            most = 0
            while not scheduler.idle:
                scheduler.run_turn()
                caches = [slot.cache for slot in scheduler.reading if slot.cache is not None]
                layers = [layer.compact for cache in caches for layer in cache.layers]
                stores = [layer.store.raw for layer in layers if layer.store is not None]
                read = sum(x.nbytes for layer in layers for x in layer.buffers)
                read += sum(x.nbytes for buffers in stores for x in buffers)
                assert scheduler.memory.used <= scheduler.memory.allocated <= room
                assert read <= len(caches) * (row + raw)
                most = max(most, len(scheduler.reading))
            assert most == together
            assert answers[0] == answers[1]
            assert not scheduler.memory.prefixes._nodes
        assert is_greedy(monkeypatch, model, ids[None], answers[0])
        with pytest.raises(ValueError, match="prompt and answer must fit the cache"):
            Scheduler(model, cache_bytes=budget - 1).submit(Request(ids.tolist(), 8))


def test_raw_tokens_leave_with_the_last_chunk():
    """Before a first step needs memory, too."""
    model, held = tiny_model(), []
    with corecontext.enabled(model, CONFIG):
        model.register_forward_hook(lambda module, args, out: held.append(returned_cache(out)))
        cache = prefill(model, tokens(1, 30), chunk_size=20).cache
    assert held == [cache] and all(layer.compact.store is None for layer in cache.layers)


def test_estimates_have_the_raw_tokens():
    model = tiny_model()
    plain = CONFIG.replace(prefill="auto")
    sizes = []
    for config in (plain, CONFIG):
        with corecontext.enabled(model, config):
            sizes.append(cache_bytes_per_token(model.config, torch.float32))
    shape = ModelSizes.of(model.config)
    assert sizes[1] - sizes[0] == 2 * shape.layers * shape.kv_heads * shape.head_dim * 4


def test_options_of_several_tokens_are_no_part_of_the_prompt(monkeypatch):
    def tokenizer(text, **options):
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    model, prompt = tiny_model(), tokens(1, 41)[0].tolist()
    options = ("ab", "cd", "dcba")
    with corecontext.enabled(model, CONFIG):
        subject = ModelSubject(Loaded(model, tokenizer, CONFIG))
        scores = []
        ends = [tokenizer(option)["input_ids"] for option in options]
        for end in ends:
            logits = defined(monkeypatch, model, torch.tensor([prompt + end]), 41)[0, 40:-1]
            scores.append(logits.log_softmax(-1)[range(len(end)), end].sum())
        calls = []
        model.register_forward_hook(lambda module, args, output: calls.append(output.logits[0]))
        assert choose(subject, prompt, options) == int(torch.stack(scores).argmax())
        for logits, end, score in zip(calls, ends, scores, strict=True):
            found = logits[:-1].log_softmax(-1)[range(len(end)), end].sum()
            torch.testing.assert_close(found, score, rtol=0, atol=1e-4)


def test_texts_are_not_scored_as_prompts():
    model, ids = tiny_model(), tokens(1, 40)
    config = CONFIG.replace(fetch_groups=2, fetch_index="mean", fetch_share=4)
    for read in ("auto", "full"):
        with corecontext.enabled(model, config.replace(prefill=read)), torch.no_grad():
            loss = model(ids, use_cache=False, labels=ids).loss.cpu()
            for chunk in (40, 13, 1):
                nll = document_nll(model, ids, chunk_size=chunk)
                torch.testing.assert_close(nll.mean(), loss, rtol=0, atol=1e-4)
            torch.testing.assert_close(model(ids, labels=ids).loss.cpu(), loss, rtol=0, atol=1e-4)
            scheduler = Scheduler(model, chunk_size=8)
            records = []
            scored = Request(ids[0].tolist(), 1, logprobs=0, prompt_logprobs=True)
            scheduler.submit(scored, on_logprobs=records.extend)
            while not scheduler.idle:
                scheduler.run_turn()
            served = -torch.tensor([record.logprob for record in records[1:40]]).mean().cpu()
            torch.testing.assert_close(served, loss, rtol=0, atol=1e-4)
            assert not scheduler.memory.prefixes._nodes
