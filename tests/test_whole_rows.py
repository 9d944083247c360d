"""Few tokens of a growing cache have no compact form: all that follows is as if they had had one
from the first token on."""

import contextlib
import copy
import functools
import random

import pytest
import torch
from budgets import fed
from families import tiny_model, tokens
from test_prefill import LENGTH, ROTARY, buffers, inputs, lengths
from transformers import DynamicCache

from corecontext import CCAConfig, enabled
from corecontext.cache import UNDO_LIMIT, CompactLayer, full, layer, whole_rows
from corecontext.integrations.hf.cache_layers import compact_layer, make_compact
from corecontext.integrations.hf.cache_name import with_cache

CONFIG = CCAConfig.paper(4, 9, sink_size=4, core_mass=True, fetch_groups=2, prefill="auto").replace(
    fetch_index="bits:2"
)
FEW = 40
near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Let rows of up to FEW tokens be read at once, and drafts have at most two tokens."""
    lengths(monkeypatch, FEW, FEW)
    monkeypatch.setattr(layer, "UNDO_LIMIT", 2)
    assert UNDO_LIMIT > 2


def pair(config=CONFIG):
    """A layer that begins whole, and one that never is."""
    return CompactLayer(config, ROTARY, begins_on_device=True), CompactLayer(config, ROTARY)


def both(layers, start, sizes, **options):
    """Append to both layers, and compare what they attend to."""
    out, wanted = (fed(x, inputs(), start, sizes, **options) for x in layers)
    near(out, wanted)
    assert layers[0].seq_len == layers[1].seq_len == start + sum(sizes)


def assert_same(layers):
    """Both layers have the same compact form."""
    for x in layers:
        x.catch_up()
    assert layers[0].whole is None
    for x, y in zip(*map(buffers, layers), strict=True):
        near(x, y)
    states = [x.state_dict() for x in layers]
    for x, y in zip(*(state["store"] for state in states), strict=True):
        near(x, y)
    for name in ("seen", "intact_from", "ended", "group_size", "ring"):
        assert states[0][name] == states[1][name], name


@pytest.mark.parametrize("changes", [{}, {"store": "host"}, {"prefill": "full"}], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_what_a_compact_form_gives(changes, seed):
    draw = random.Random(seed)
    layers = pair(CONFIG.replace(**changes))
    end = 0
    while end < LENGTH:
        size = draw.choice([1, 1, 1, 3, 5, 17]) if end else draw.choice([1, 4, 13, FEW, FEW + 1])
        size = min(size, LENGTH - end)
        before = layers[0].whole
        both(layers, end, [size])
        end += size
        if end > FEW or (before is None and end > size):
            assert layers[0].whole is None
    assert_same(layers)


@pytest.mark.parametrize("sizes", [[1], [20], [20, 1, 1, 1, 1, 1], [7, 9, 1, 8]], ids=str)
def test_the_compact_form_is_that_of_a_layer_that_always_had_it(sizes):
    layers = pair()
    both(layers, 0, sizes)
    assert layers[0].whole is not None and not layers[0]._buffers and layers[0].store is None
    assert_same(layers)
    both(layers, sum(sizes), [1, 1, 3])


def test_bytes_are_those_of_the_tokens():
    whole, _ = pair()
    fed(whole, inputs(), 0, [20, 1])
    assert whole.nbytes == 21 * 2 * 2 * 2 * 16 * 8 and whole.host_bytes == 0
    assert whole.allocated_bytes == 2 * whole.whole.buffers[0].nbytes >= whole.nbytes
    cache = DynamicCache()
    compact_layer(cache, 0, CONFIG, ROTARY)
    compact = cache.layers[0].compact
    fed(compact, inputs(), 0, [20])
    assert compact.whole is not None
    make_compact(cache)
    assert compact.whole is None and compact.store is not None
    # Heads of different group sizes are several layers in one, and never whole.
    heads = DynamicCache()
    compact_layer(heads, 0, CCAConfig.paper(4, 9, head_group_sizes=(4, 2)), ROTARY)
    fed(heads.layers[0].compact, inputs(), 0, [20])
    before = heads.layers[0].nbytes
    make_compact(heads)
    assert heads.layers[0].nbytes == before > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.crop(1),
        lambda x: x.crop(20),
        lambda x: x.select(torch.tensor([1, 1])),
        lambda x: x.repeat(2),
        lambda x: x.shrink_window(5),
        lambda x: x.load_state_dict(x.state_dict()),
        lambda x: x.reset(),
    ],
    ids=["crop", "crop all", "select", "repeat", "shrink", "load", "reset"],
)
@pytest.mark.parametrize("sizes", [[20], [19, 1]], ids=str)
def test_changes_are_those_of_a_compact_form(change, sizes):
    layers = pair()
    both(layers, 0, sizes)
    errors = []
    for x in layers:
        try:
            change(x)
        except ValueError as error:
            errors.append(str(error))
    assert len(set(errors)) == len(errors) // 2
    start = layers[1].seq_len
    q, k, v = inputs()
    rows = len(layers[1].pads) or 2
    tensors = tuple(x[:1].expand(rows, -1, -1, -1) for x in (q, k, v))
    outs = [fed(x, tensors, start, [5, 1]) for x in layers]
    near(*outs)


@pytest.mark.parametrize(
    "options",
    [
        {"is_prompt": False},
        {"softcap": 20.0},
        {"attention_mask": torch.tensor([[0] * 3 + [1] * 17, [1] * 20])},
    ],
    ids=["draft", "softcap", "padding"],
)
def test_other_calls_have_a_compact_form_from_the_first_token(options):
    layers = pair()
    both(layers, 0, [20], **options)
    assert layers[0].whole is None
    options.pop("attention_mask", None)
    both(layers, 20, [1, 1], **options)


def test_a_padding_mask_behind_few_tokens():
    layers = pair()
    both(layers, 0, [20])
    both(layers, 20, [5], attention_mask=torch.ones(2, 25))
    assert_same(layers)


def test_a_copy_goes_on_by_itself():
    whole, other = pair()
    both((whole, other), 0, [20])
    copied = copy.deepcopy(whole)
    fed(whole, inputs(), 30, [1, 1, 1])
    both((copied, other), 20, [1, 1])


def test_gradients_reach_no_filled_cache():
    whole, other = pair()
    both((whole, other), 0, [20])
    tensors = [x.clone().requires_grad_() for x in inputs()]
    with pytest.raises(ValueError, match="gradients must not be asked"):
        fed(whole, tensors, 20, [1])
    both((whole, other), 20, [1])
    first, other = pair()
    out = fed(first, tensors, 0, [20])
    (gradient,) = torch.autograd.grad(out.sum(), tensors[0])
    assert first.whole is None and gradient.abs().sum() > 0


@pytest.mark.parametrize("name", ["step_on_all", "attend_causally"])
def test_an_error_leaves_few_tokens_as_they_are(name, monkeypatch):
    layers = pair()
    both(layers, 0, [20, 1])

    def fails(*arguments, **options):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(whole_rows, name, fails)
        with pytest.raises(torch.OutOfMemoryError):
            fed(layers[0], inputs(), 21, [1 if name == "step_on_all" else 9])
    both(layers, 21, [1, 9, 1])
    assert_same(layers)


def test_attention_may_lay_out_a_step_in_any_way(monkeypatch):
    """Some of PyTorch's kernels return heads behind tokens in memory."""
    attend = full.step_attention

    def other_layout(*arguments):
        return attend(*arguments).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(full, "step_attention", other_layout)
    both(pair(), 0, [20, 1, 1])


def test_rows_must_stay():
    whole, _ = pair()
    fed(whole, inputs(), 0, [20])
    with pytest.raises(ValueError, match="the batch must keep its 2 rows, got 1"):
        fed(whole, [x[:1] for x in inputs()], 20, [1])


MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 5},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "drafts": {"prompt_lookup_num_tokens": 4},
    "returned": {"do_sample": True, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 40},
    "padded": {"attention_mask": torch.stack([torch.ones(90), torch.arange(90) // 30 > 0]).long()},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate_is_that_of_transformers(monkeypatch, mode):
    """The default, on texts that are few tokens."""
    monkeypatch.undo()
    model = tiny_model()
    ids = tokens(1 if mode == "drafts" else 2, 90)
    options = {"do_sample": False, "max_new_tokens": 40, "attention_mask": torch.ones_like(ids)}
    outs = []
    for attention in (contextlib.nullcontext(), enabled(model, CCAConfig())):
        with attention:
            torch.manual_seed(1)
            outs.append(model.generate(ids, **{**options, **MODES[mode]}))
    assert outs[0].shape[1] == 130 and torch.equal(*outs)


def test_turns_of_a_chat_are_those_of_transformers(monkeypatch):
    """A short turn makes the compact form, which a long one goes on with."""
    monkeypatch.undo()
    model = tiny_model()
    outs = []
    for attention in (contextlib.nullcontext(), enabled(model, CCAConfig())):
        with attention:
            cache, ids = DynamicCache(config=model.config), tokens(1, 50)
            for turn in (40, 300, 20, 0):
                options = {"max_new_tokens": 12, "attention_mask": torch.ones_like(ids)}
                out = model.generate(ids, **with_cache(cache), do_sample=False, **options)
                ids = torch.cat((out, tokens(1, 300)[:, :turn]), 1)
            outs.append(out)
    assert torch.equal(*outs)
