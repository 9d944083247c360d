"""The plug-in: every family against a dense oracle, every way of generating, and every refusal."""

import copy
import warnings

import pytest
import torch
from families import FAMILIES, HYBRID, oracle_logits, recompute, stateless, tiny_model, tokens
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import corecontext
from corecontext import CCAConfig
from corecontext.integrations.hf.cache_layers import CCALayer, cache_bytes
from corecontext.integrations.hf.cache_name import NAME, OLD_NAME, returned_cache, with_cache
from corecontext.integrations.hf.enabling import handle_of
from corecontext.train.arguments import checkpointing_name

pytestmark = pytest.mark.usefixtures("default_device")
CONFIG = CCAConfig.paper(group_size=4, window_size=9)
PROMPT = 37


@pytest.fixture
def model():
    model = tiny_model()
    corecontext.enable(model, CONFIG)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_dense_oracle(family):
    model, ids = tiny_model(family), tokens(2, 61)
    with torch.no_grad():
        full = model(ids).logits
    expected = oracle_logits(model, ids, 4, 9)
    assert (full - expected).abs().max() > 0.5  # the comparison means something
    with corecontext.enabled(model, CONFIG):
        torch.testing.assert_close(stateless(model, ids), expected, rtol=1e-4, atol=3e-5)
        logits, cache = [], None
        with torch.no_grad():
            for a, b in ((0, 20), (20, 21), (21, 28), (28, 29), (29, 61)):
                step = model(ids[:, a:b], **with_cache(cache), use_cache=True)
                logits, cache = [*logits, step.logits], returned_cache(step)
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=3e-5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, full)


@pytest.mark.parametrize("name", [OLD_NAME, NAME])
def test_a_cache_may_be_given_by_the_old_name(name):
    model = tiny_model()
    ids = tokens(1, 40)
    with corecontext.enabled(model, CONFIG), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the old name, from transformers 5.24 on
        cache = DynamicCache(config=model.config)
        steps = [model(ids[:, a:b], **{name: cache}).logits for a, b in ((0, 30), (30, 40))]
        assert isinstance(cache.layers[0], CCALayer)
        torch.testing.assert_close(torch.cat(steps, 1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2-hybrid"])
def test_sliding_layers_stay(family):
    model = tiny_model(family)
    with corecontext.enabled(model, CONFIG), torch.no_grad():
        cache = returned_cache(model(tokens(1, 30), use_cache=True))
    kinds = [type(layer) for layer in cache.layers]
    assert kinds[model.config.layer_types.index("full_attention")] is CCALayer
    assert kinds[model.config.layer_types.index("sliding_attention")] is DynamicSlidingWindowLayer


def test_only_the_given_model_changes_and_disable_restores():
    model, other = tiny_model(), tiny_model()
    before = copy.deepcopy(model.config.to_dict())
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    handle = corecontext.enable(model, CONFIG)
    assert handle_of(model) is handle and handle_of(other) is None
    assert other.config._attn_implementation == "sdpa" and not hasattr(other.config, "cca")
    handle.disable()
    assert model.config.to_dict() == before and model.config._attn_implementation == "sdpa"
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert handle_of(model) is None
    with pytest.raises(ValueError, match="no longer in use"):
        handle.disable()


def test_full_attention_refuses_a_cache_of_cca():
    """It would see the newest token alone."""
    model = tiny_model()
    with corecontext.enabled(model, CONFIG), torch.no_grad():
        cache = returned_cache(model(tokens(1, 30), use_cache=True))
        cache = returned_cache(model(tokens(1, 1), **with_cache(cache)))
    with pytest.raises(ValueError, match="cache must be one of the model's"):
        model(tokens(1, 1), **with_cache(cache))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 10},
        {"prefill_chunk_size": 10, "cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 5},
        {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1},
    ],
    ids=str,
)
def test_greedy_equals_recomputing(model, options):
    ids = tokens(1, PROMPT)
    ids[:, 20:30] = ids[:, 5:15]  # something for prompt lookup to find
    out = model.generate(ids, max_new_tokens=30, do_sample=False, **options)
    assert torch.equal(out, recompute(model, ids, 30))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2-hybrid", "phi3", "glm4"])
@pytest.mark.parametrize("static", [False, True])
def test_greedy_of_other_families(family, static):
    model, ids = tiny_model(family), tokens(1, PROMPT)
    with corecontext.enabled(model, CONFIG):
        out = model.generate(
            ids,
            max_new_tokens=12,
            do_sample=False,
            cache_implementation="static" if static else None,
        )
        assert torch.equal(out, recompute(model, ids, 12))


def test_assisted_decoding(model):
    ids, assistant = tokens(1, PROMPT), tiny_model(num_hidden_layers=1)
    expected = recompute(model, ids, 25)
    assert torch.equal(
        model.generate(ids, assistant_model=assistant, max_new_tokens=25, do_sample=False), expected
    )
    corecontext.enable(assistant, CONFIG, rollback=32)
    assert torch.equal(
        model.generate(ids, assistant_model=assistant, max_new_tokens=25, do_sample=False), expected
    )


@pytest.mark.parametrize("draft", [1, 6])
@pytest.mark.parametrize("turns", [(37,), (3, 300)], ids=str)
def test_a_first_draft_is_taken_back(model, turns, draft):
    """It comes in one call with the prompt, or with a long turn on a filled cache."""
    ids, cache = tokens(1, sum(turns)), DynamicCache(config=model.config)
    with torch.no_grad():
        for turn in turns[:-1]:
            model(ids[:, :turn], **with_cache(cache))
        for length in range(
            ids.shape[1] - 5, ids.shape[1] + 1
        ):  # each way of groups and draft to lie
            branch = copy.deepcopy(cache)
            both = torch.cat((ids[:, sum(turns[:-1]) : length], tokens(1, draft, seed=length)), 1)
            kept = model(both, **with_cache(branch), logits_to_keep=draft + 1).logits
            torch.testing.assert_close(
                kept[:, :1], stateless(model, ids[:, :length])[:, -1:], rtol=1e-4, atol=3e-5
            )
            branch.crop(-draft)
            after = torch.cat((ids[:, :length], tokens(1, 1)), 1)
            torch.testing.assert_close(
                model(after[:, -1:], **with_cache(branch)).logits,
                stateless(model, after)[:, -1:],
                rtol=1e-4,
                atol=3e-5,
            )


def test_prompt_lookup_with_a_wrong_first_draft(model):
    ids = tokens(1, PROMPT)
    ids[:, -4:] = ids[:, 5:9]
    out = model.generate(ids, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=5)
    assert torch.equal(out, recompute(model, ids, 4))


def test_beam_search_and_sampling(model):
    ids = tokens(2, PROMPT)
    for options in (
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    ):
        torch.manual_seed(5)
        cached = model.generate(ids, max_new_tokens=14, **options)
        torch.manual_seed(5)
        assert torch.equal(
            cached, model.generate(ids, max_new_tokens=14, use_cache=False, **options)
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 9},
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 12},
        {"prefill_chunk_size": 1, "cache_implementation": "static"},
        {"num_beams": 3},
    ],
    ids=str,
)
def test_left_padded_batch_equals_single_rows(model, options):
    lengths = (37, 22, 5, 30)
    rows = [tokens(1, n, seed=n) for n in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (37 - row.shape[1], 0)) for row in rows])
    mask = torch.cat(
        [torch.nn.functional.pad(torch.ones_like(row), (37 - row.shape[1], 0)) for row in rows]
    )
    out = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, **options)
    for i, row in enumerate(rows):
        alone = model.generate(
            row, max_new_tokens=16, do_sample=False, num_beams=options.get("num_beams", 1)
        )
        assert torch.equal(out[i, 37:], alone[0, lengths[i] :])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_one_token_chunks_inside_padding(family, static):
    """Each chunk brings its mask, and a row of nothing but padding so far takes none of it for a
    token."""
    model, row = tiny_model(family), tokens(1, 12)
    ids, mask = tokens(2, 37), torch.ones(2, 37, dtype=torch.long)
    ids[0, 25:], mask[0, :25] = row, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with corecontext.enabled(model, CONFIG), torch.no_grad():
        for sizes in ([1] * 37, [9, 1, 14, 1, 1, 11], [1, 23, 1, 12]):
            cache = (
                StaticCache(model.config, max_cache_len=40)
                if static
                else DynamicCache(config=model.config)
            )
            start, logits = 0, []
            for size in sizes:
                end = start + size
                logits.append(
                    model(
                        ids[:, start:end],
                        attention_mask=mask[:, :end],
                        position_ids=positions[:, start:end],
                        **with_cache(cache),
                    ).logits
                )
                start = end
            got = torch.cat(logits, 1)
            torch.testing.assert_close(got[:1, 25:], stateless(model, row), rtol=1e-4, atol=3e-5)
            torch.testing.assert_close(got[1:], stateless(model, ids[1:]), rtol=1e-4, atol=3e-5)


class Syncs(TorchDispatchMode):
    """Counts what the host reads from the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return func(*args, **(kwargs or {}))


def test_a_decoding_step_of_a_padded_batch_reads_nothing_back(model):
    """So it can be captured; a mask that grows with every step changes nothing about that."""
    ids, mask = tokens(2, 37), torch.ones(2, 40, dtype=torch.long)
    mask[0, :25] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = StaticCache(model.config, max_cache_len=40)
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :37], position_ids=positions[:, :37], **with_cache(cache))
        with Syncs() as syncs:
            for end in (38, 39):
                model(
                    ids[:, :1],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, end - 1 : end],
                    **with_cache(cache),
                )
            assert syncs.count == 0
            assert cache.layers[0].compact.seq_len == 39 and syncs.count == 1  # what is counted


def test_padding_without_cache_left_and_right(model):
    row, ids = tokens(1, 25), tokens(2, 40)
    alone = stateless(model, row)
    for place in (slice(15, 40), slice(0, 25)):
        mask = torch.zeros(2, 40, dtype=torch.long)
        mask[0, place], mask[1] = 1, 1
        ids[0, place] = row
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for use_cache in (False, True):
            with torch.no_grad():
                out = model(
                    ids, attention_mask=mask, position_ids=positions, use_cache=use_cache
                ).logits
            torch.testing.assert_close(out[:1, place], alone, rtol=1e-4, atol=2e-5)


def test_turns_on_one_cache_and_branches(model):
    ids = tokens(1, 90)
    first = model.generate(
        ids[:, :30], max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )
    cache = returned_cache(first)
    for end in (50, 51, 90):
        branch = copy.deepcopy(cache)
        longer = torch.cat((first.sequences, ids[:, 30:end]), 1)
        out = model.generate(longer, **with_cache(branch), max_new_tokens=8, do_sample=False)
        assert torch.equal(out, recompute(model, longer, 8))
    assert cache.get_seq_length() == 37  # branching left the prefilled cache alone


def test_user_made_caches(model):
    ids = tokens(1, PROMPT)
    expected = recompute(model, ids, 10)
    for cache in (
        DynamicCache(),
        DynamicCache(config=model.config),
        StaticCache(model.config, max_cache_len=64),
    ):
        assert torch.equal(
            model.generate(ids, **with_cache(cache), max_new_tokens=10, do_sample=False), expected
        )
        assert all(isinstance(layer, CCALayer) for layer in cache.layers)
        cache.reset()
        assert torch.equal(
            model.generate(ids, **with_cache(cache), max_new_tokens=10, do_sample=False), expected
        )


def test_inputs_embeds(model):
    ids = tokens(1, PROMPT)
    embeds = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embeds, max_new_tokens=9, do_sample=False)
    assert torch.equal(out, recompute(model, ids, 9)[:, PROMPT:])


def test_cache_bytes_follow_the_formula_from_the_first_token(model):
    config, cache = model.config, None
    for length in range(1, 60):
        with torch.no_grad():
            cache = returned_cache(
                model(tokens(1, 1, seed=length), **with_cache(cache), use_cache=True)
            )
        entries = length // 4 + 9 + 4 - 1
        assert (
            cache_bytes(cache)
            == entries * config.num_hidden_layers * config.num_key_value_heads * 2 * 16 * 4
        )
    with torch.no_grad():
        prefilled = returned_cache(model(tokens(1, 59), use_cache=True))
    assert cache_bytes(prefilled) == cache_bytes(cache)
    held = sum(layer.compact.allocated_bytes for layer in prefilled.layers)
    assert held == cache_bytes(prefilled)  # nothing of full length survives a prefill


def test_save_and_load_round_trip(model, tmp_path):
    model.save_pretrained(tmp_path)
    ids = tokens(1, 50)
    expected = stateless(model, ids)
    loaded = corecontext.from_pretrained(str(tmp_path))
    assert handle_of(loaded).config == CONFIG and torch.equal(stateless(loaded, ids), expected)
    by_name = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="cca")
    with pytest.raises(RuntimeError, match=r"corecontext\.enable\(model\)"):
        by_name(ids)
    corecontext.enable(by_name)
    assert torch.equal(stateless(by_name, ids), expected)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)  # loads like any checkpoint, without CCA
    assert handle_of(plain) is None and not torch.equal(stateless(plain, ids), expected)


def test_configure_is_elastic(model):
    ids, handle = tokens(1, 60), handle_of(model)
    with torch.no_grad():
        old = returned_cache(model(ids, use_cache=True))
    handle.configure(group_size=3, window_size=12)
    torch.testing.assert_close(
        stateless(model, ids), oracle_logits_disabled(ids, 3, 12), rtol=1e-4, atol=3e-5
    )
    with pytest.raises(ValueError, match="must keep its settings"):
        model(ids[:, :1], **with_cache(old))


def oracle_logits_disabled(ids, g, s):
    return oracle_logits(tiny_model(), ids, g, s)


def test_num_groups_follows_the_prompt():
    model, ids = tiny_model(), tokens(1, 61)
    with corecontext.enabled(model, CCAConfig.paper(num_groups=13, window_size=9)):
        expected = oracle_logits(tiny_model(), ids, 4, 9)  # ceil((61 - 9) / 13) = 4
        torch.testing.assert_close(stateless(model, ids), expected, rtol=1e-4, atol=3e-5)
        with torch.no_grad():
            out = model(ids, use_cache=True)
            torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=3e-5)
            model(ids[:, :1], **with_cache(returned_cache(out)))
            with pytest.raises(ValueError, match="whole prompt in one call"):
                model(ids[:, :2], **with_cache(returned_cache(out)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_and_checkpointing(model, reentrant):
    ids = tokens(2, 50)

    def gradients(**options):
        model.zero_grad()
        model(ids, labels=ids, **options).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(use_cache=False)
    handle_of(model).disable()
    full = gradients(use_cache=False)
    assert not torch.allclose(expected[0], full[0], rtol=1e-2)
    for backend in ("reference", "packed"):
        with corecontext.enabled(model, CONFIG.replace(backend=backend)):
            for a, b in zip(
                gradients(use_cache=True), expected
            ):  # use_cache is the default in training, too
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    with corecontext.enabled(model, CONFIG):
        model.train()
        getattr(model, f"{checkpointing_name()}_enable")({"use_reentrant": reentrant})
        for a, b in zip(gradients(), expected):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_packed_documents_do_not_see_each_other(model):
    lengths = (20, 1, 33)
    docs = [tokens(1, n, seed=n) for n in lengths]
    ids = torch.cat(docs, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([stateless(model, doc) for doc in docs], 1)
    edges = torch.tensor([0, 20, 21, 54], dtype=torch.int32)
    with torch.no_grad():
        by_positions = model(ids, position_ids=positions, use_cache=False).logits
        by_edges = model(
            ids,
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=edges,
            cu_seq_lens_k=edges,
            max_length_q=33,
            max_length_k=33,
        ).logits
        cached = model(ids, position_ids=positions, use_cache=True)
        for out in (by_positions, by_edges, cached.logits):
            torch.testing.assert_close(out, alone, rtol=1e-4, atol=2e-5)
        with pytest.raises(ValueError, match="documents packed in one row"):
            model(ids[:, :1], **with_cache(returned_cache(cached)))


def test_packed_documents_beside_sliding_layers_need_no_cache():
    model, docs = tiny_model("gemma2"), [tokens(1, n, seed=n) for n in (20, 13)]
    ids, positions = torch.cat(docs, 1), torch.cat([torch.arange(20), torch.arange(13)])[None]
    with corecontext.enabled(model, CONFIG), torch.no_grad():
        alone = torch.cat([stateless(model, doc) for doc in docs], 1)
        torch.testing.assert_close(
            model(ids, position_ids=positions, use_cache=False).logits, alone, rtol=1e-4, atol=3e-5
        )
        with pytest.raises(ValueError, match="use_cache must be False for packed documents"):
            model(ids, position_ids=positions)


def test_deepcopied_model_is_independent(model):
    ids = tokens(1, 40)
    twin = copy.deepcopy(model)
    expected = stateless(model, ids)
    handle_of(model).disable()
    assert torch.equal(stateless(twin, ids), expected)
    assert torch.equal(
        twin.generate(ids, max_new_tokens=5, do_sample=False), recompute(twin, ids, 5)
    )
    handle_of(twin).disable()
    assert torch.equal(stateless(twin, ids), stateless(model, ids))


def test_low_precision_stays_close():
    model, ids = tiny_model(), tokens(1, 60)
    for dtype in (torch.bfloat16, torch.float16):
        low = copy.deepcopy(model).to(dtype)
        full_error = (stateless(low, ids).float() - stateless(model, ids)).abs().mean()
        with corecontext.enabled(model, CONFIG), corecontext.enabled(low, CONFIG):
            truth, out = stateless(model, ids), stateless(low, ids)
            with torch.no_grad():
                cached = low(ids, use_cache=True).logits
        assert out.dtype == dtype
        assert (out.float() - truth).abs().mean() < 1.5 * full_error + 1e-3
        assert (cached.float() - truth).abs().mean() < 1.5 * full_error + 1e-3


@pytest.mark.parametrize("use_cache", [False, True])
def test_autocast_trains_and_generates(model, use_cache, monkeypatch):
    handle_of(model).configure(backend="packed")  # whose pooling can be watched
    ids = tokens(2, 60)
    truth = stateless(model, ids)
    from corecontext.ops import pooling

    seen, original = [], pooling.weights_of
    monkeypatch.setattr(
        pooling, "weights_of", lambda *a: (seen.append(out := original(*a)), out)[1]
    )
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model(ids, labels=ids, use_cache=use_cache)
        out.loss.backward()
        generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert generated.shape == (2, 65)
    # Autocast leaves the pooling alone.
    assert {weights.dtype for weights, *_ in seen} == {torch.float32}
    assert (out.logits.float() - truth).abs().mean() < 0.1
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_compiled_forward_and_training_have_no_graph_break(model):
    ids = tokens(2, 48)
    expected = stateless(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(stateless(compiled, ids), expected, rtol=1e-4, atol=1e-5)
    model(ids, labels=ids, use_cache=False).loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    for a, b in zip((p.grad for p in model.parameters()), grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_compiled_static_decoding_is_one_graph(model):
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    cache = StaticCache(model.config, max_cache_len=80)
    eager = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        out = model(
            ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            **with_cache(cache),
        )
        got, positions = [out.logits[:, -1].argmax(-1)], mask.sum(1)
        for i in range(19):
            out = step(got[-1][:, None], **with_cache(cache), position_ids=(positions + i)[:, None])
            got.append(out.logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(got, 1), eager[:, 40:])
    assert counter.frame_count == 1


def test_no_square_mask_is_built(model, monkeypatch):
    seen = []
    from corecontext.integrations.hf import layer_call as plugin

    original = plugin.attend

    def watched(inputs, spec, ragged, backend):
        seen.append(ragged.attention_mask)
        return original(inputs, spec, ragged, backend)

    monkeypatch.setattr(plugin, "attend", watched)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        model(tokens(2, 30), attention_mask=mask, use_cache=False)
        model(tokens(2, 30), use_cache=False)
    assert [None if m is None else tuple(m.shape) for m in seen] == [(2, 30)] * 2 + [None] * 2


# Refusals


def test_refuses_untested_architecture():
    other = AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50)
    )
    with pytest.raises(NotImplementedError, match="architecture 'gpt2' is not tested.*llama"):
        corecontext.enable(other, CONFIG)
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel"):
        corecontext.enable(torch.nn.Linear(2, 2), CONFIG)


def test_refuses_all_sliding_layers():
    with pytest.raises(ValueError, match="all with a sliding window"):
        corecontext.enable(tiny_model("mistral", sliding_window=8), CONFIG)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}], ids=["dynamic"]
)
def test_refuses_rotary_that_changes_with_length(rope):
    model = tiny_model(rope_parameters=rope)
    with pytest.raises(NotImplementedError, match="with the length.*train --core-position token"):
        corecontext.enable(model, CONFIG)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "cca")
    corecontext.enable(model, CONFIG.replace(core_position="token")).disable()


def test_refuses_twice(model):
    with pytest.raises(ValueError, match="must not be enabled twice"):
        corecontext.enable(model, CONFIG)


def test_refuses_the_settings_of_rivals():
    from corecontext.baselines import StreamingLLM

    with pytest.raises(
        TypeError,
        match="config must be a CCAConfig, got StreamingLLM.*corecontext.baselines.enable",
    ):
        corecontext.enable(tiny_model(), StreamingLLM())


def test_refuses_foreign_caches(model):
    plain, ids = tiny_model(), tokens(1, 20)
    with torch.no_grad():
        filled = returned_cache(plain(ids, use_cache=True))
    with pytest.raises(ValueError, match="tokens cached by another attention"):
        model(ids[:, :1], **with_cache(filled))
    with pytest.raises(NotImplementedError, match="layer type DynamicSlidingWindowLayer"):
        model(
            ids, **with_cache(DynamicCache(config=tiny_model("mistral", sliding_window=8).config))
        )
    quantized = DynamicCache(config=model.config)
    quantized.layers[0] = type("QuantoQuantizedLayer", (DynamicLayer,), {})()
    with pytest.raises(
        NotImplementedError, match="layer type QuantoQuantizedLayer cannot hold core tokens"
    ):
        model(ids, **with_cache(quantized))
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    with pytest.raises(NotImplementedError, match="offloaded cache"):
        model(ids, **with_cache(offloaded))


def test_refuses_masks_with_holes_and_square_masks(model):
    ids, mask = tokens(1, 20), torch.ones(1, 20, dtype=torch.long)
    mask[0, 7] = 0
    for use_cache in (False, True):
        with pytest.raises(ValueError, match="a hole in row 0"):
            model(ids, attention_mask=mask, use_cache=use_cache)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, L\]"):
        model(ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool))


def test_refuses_continuing_a_right_padded_batch(model):
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    with torch.no_grad():
        cache = returned_cache(model(ids, attention_mask=mask, use_cache=True))
        with pytest.raises(ValueError, match="padded on the right"):
            model(ids[:, :1], **with_cache(cache))


@pytest.mark.parametrize("how", ["kwarg", "generate"])
def test_refuses_output_attentions(model, how):
    ids = tokens(1, 12)
    with pytest.raises(NotImplementedError, match="output_attentions cannot be returned"):
        if how == "kwarg":
            model(ids, output_attentions=True)
        else:
            model.generate(
                ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
            )


def test_refuses_empty_inputs(model):
    for shape in ((1, 0), (0, 5)):
        ids = torch.zeros(shape, dtype=torch.long)
        with pytest.raises(
            ValueError, match=f"^input_ids must hold .*shape \\[{shape[0]}, {shape[1]}\\]"
        ):
            model(ids)


def test_refuses_dropout():
    model = tiny_model(attention_dropout=0.1).train()
    corecontext.enable(model, CONFIG)
    with pytest.raises(NotImplementedError, match="attention dropout must be 0"):
        model(tokens(1, 12))


def test_refuses_changed_implementation(model):
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="must stay 'cca' while CCA is enabled"):
        model(tokens(1, 12))


def test_refuses_gradients_through_a_filled_cache(model):
    ids = tokens(1, 20)
    cache = returned_cache(model(ids, use_cache=True))
    for n in (1, 3):
        with pytest.raises(
            ValueError, match="gradients must not be asked through a filled compact cache"
        ):
            model(ids[:, :n], **with_cache(cache))


def test_hybrid_list_is_what_the_families_say():
    assert tiny_model("gemma2").config.layer_types == HYBRID
