"""The attention of layers in vLLM, with its caches and its manager of pages, against the reference:
on the GPU where there is one, else in Triton's interpreter."""

import gc
import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("vllm", reason="the plug-in to vLLM needs vllm")

import bounds_check
from transformers import LlamaConfig
from vllm import forward_context
from vllm.model_executor.layers.attention import attention as vllm_attention
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes
from vllm_planning import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    planning_config,
)

from corecontext import CCAConfig, cca_attention
from corecontext.cost import ModelCost
from corecontext.integrations.vllm import (
    cache_plan,
    capacity,
    host_pages,
    offloading,
    paged_backend,
    plugin,
)
from corecontext.integrations.vllm.engine_options import check_server
from corecontext.integrations.vllm.host_writes import HostWrites
from corecontext.integrations.vllm.model_settings import rotary_of, settings_of
from corecontext.integrations.vllm.offloading import complete_tokens
from corecontext.integrations.vllm.whole_prompts import flash_attention
from corecontext.ops.fetch import prompt_rule
from corecontext.ops.fetch.prompt_rule import reading_of
from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged import chunk as paged_chunk
from corecontext.ops.triton.paged.gather import Span, gather_chunk
from corecontext.ops.triton.paged.pages import Batch
from corecontext.ops.triton.pool import launcher as pool

pytestmark = pytest.mark.usefixtures("default_device")
DIM, KV_HEADS, HEADS, LAYERS, PAGE = 16, 2, 4, 2, 4
TINY = CCAConfig.pooling(group_size=3, window_size=4, sink_size=3, core_mass=False)


def hf_config(**cca) -> LlamaConfig:
    config = LlamaConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=LAYERS,
        rope_theta=100.0,
        architectures=["LlamaForCausalLM"],
    )
    config.cca = {**TINY.to_dict(), **cca}
    return config


def vllm_config(**cca) -> SimpleNamespace:
    """The fields of vLLM's config that attention reads; the whole one needs a device of vLLM's."""
    config = planning_config(PAGE)
    config.cache_config.cache_dtype = "auto"
    config.cache_config.calculate_kv_scales = False
    config.cache_config.kv_cache_dtype_skip_layers = []
    config.cache_config.sliding_window = None
    config.model_config = SimpleNamespace(
        hf_text_config=hf_config(**cca),
        dtype=torch.float32,
        max_model_len=128,
        is_mm_prefix_lm=False,
        use_mla=False,
    )
    config.compilation_config = SimpleNamespace(
        static_forward_context={}, max_cudagraph_capture_size=None
    )
    return config


@pytest.fixture
def make_layers(monkeypatch):
    """Build attention layers of vLLM with our backend, under a config."""

    def make(config: SimpleNamespace, kv_heads: int = KV_HEADS) -> list:
        plugin.register()
        plugin.register()  # as in a process that starts another
        for module in (vllm_attention, paged_backend):
            monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
        layers = [
            vllm_attention.Attention(
                *(HEADS // KV_HEADS * kv_heads, DIM, DIM**-0.5, kv_heads),
                cache_config=config.cache_config,
                prefix=f"model.layers.{i}.self_attn.attn",
                attn_backend=AttentionBackendEnum.CUSTOM.get_class(),
            )
            for i in range(LAYERS)
        ]
        for layer in layers:
            layer.process_weights_after_loading(torch.float32)
        return layers

    return make


class Runner:
    """The part of vLLM's model runner that owns caches and describes batches."""

    def __init__(self, config: SimpleNamespace, num_pages: int) -> None:
        self.layers = config.compilation_config.static_forward_context
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in self.layers.items()}
        groups = get_kv_cache_groups(config, specs)
        size = LAYERS * num_pages * next(iter(specs.values())).page_size_bytes
        self.caches = get_kv_cache_config_from_groups(config, groups, size)
        config.cache_config.num_gpu_blocks = num_pages
        sizes = resolve_kv_cache_block_sizes(self.caches, config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(sizes[1], sha256)
        self.manager = KVCacheManager(self.caches, 128, *sizes, max_in_flight_tokens=64)
        backend = paged_backend.CoreContextBackend
        attention_groups = [
            SimpleNamespace(
                kv_cache_spec=group.kv_cache_spec,
                backend=backend,
                kv_cache_group_id=i,
                layer_names=group.layer_names,
            )
            for i, group in enumerate(groups)
        ]
        blocks = prepare_kernel_block_sizes(self.caches, [[group] for group in attention_groups])
        device = torch.get_default_device()
        layout = config.cache_config.get_resolved_kv_cache_layout()
        for name, cache in allocate_kv_cache(self.caches, device, layout, blocks).items():
            self.layers[name].bind_kv_cache(cache.fill_(torch.nan))
        self.builders = [
            backend.get_builder_cls()(
                *(group.kv_cache_spec, group.layer_names, config, torch.get_default_device())
            )
            for group in groups
        ]

    def request(self, name: str, tokens: list[int]) -> Request:
        params = SamplingParams(max_tokens=99)
        return Request(name, tokens, params, None, block_hasher=self.hasher)

    def metadata(self, requests: list[Request], counts: list[int]) -> dict:
        """Metadata of each layer for the next tokens of some requests, whose pages are there."""
        lengths = [r.num_computed_tokens + n for r, n in zip(requests, counts)]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tables = [self.manager.get_block_ids(r.request_id) for r in requests]
        layers = {}
        for kind, group in enumerate(self.caches.kv_cache_groups):
            rows = [torch.tensor(table[kind], dtype=torch.int32) for table in tables]
            table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            size = group.kv_cache_spec.block_size
            slots = [
                tables[i][kind][p // size] * size + p % size
                for i, (request, count) in enumerate(zip(requests, counts))
                for p in range(request.num_computed_tokens, request.num_computed_tokens + count)
            ]
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts.cpu(),
                seq_lens=torch.tensor(lengths).int(),
                num_reqs=len(requests),
                num_actual_tokens=sum(counts),
                max_query_len=max(counts),
                max_seq_len=max(lengths),
                block_table_tensor=table,
                slot_mapping=torch.tensor(slots),
                seq_lens_cpu_upper_bound=torch.tensor(lengths, device="cpu"),
                is_prefilling=torch.tensor(
                    [r.num_computed_tokens < r.num_prompt_tokens for r in requests], device="cpu"
                ),
            )
            built = self.builders[kind].build(0, common)
            layers.update(dict.fromkeys(group.layer_names, built))
        return layers


def tensors_of(tokens: list[int], layer: int) -> list[torch.Tensor]:
    """q, k and v of a layer, functions of each token and its position alone."""
    rows = []
    for position, token in enumerate(tokens):
        generator = torch.Generator("cpu").manual_seed(1000 * token + 10 * position + layer)
        rows.append(torch.randn(HEADS + 2 * KV_HEADS, DIM, generator=generator, device="cpu"))
    both = torch.stack(rows).to(torch.get_default_device())
    return list(both.split([HEADS, KV_HEADS, KV_HEADS], 1))


def expected(tokens: list[int], layer: int, config: CCAConfig, prompt: int) -> torch.Tensor:
    """The layer's outputs; with fetch the tokens of a prompt see all tokens, or share a choice."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in tensors_of(tokens, layer))
    config = config.of_layer(layer)
    options = {
        "group_size": config.head_group_sizes or config.group_size,
        "sink_size": config.sink_size,
        "core_mass": config.core_mass,
        "rotary": rotary_of(hf_config()),
        "backend": "reference",
    }
    fetch = {"fetch_groups": config.fetch_groups, "fetch_index": config.fetch_index}
    out = cca_attention(q, k, v, window_size=config.window_size, **fetch, **options)
    if config.fetch_groups:
        reading = reading_of(config, torch.get_default_device().type, True)
        own = [x[:, :, :prompt] for x in (q, k, v)]
        fetch["fetch_share"] = reading.share
        fetch["fetch_groups"] *= reading.times
        out[:, :, :prompt] = cca_attention(*own, window_size=config.window_size, **fetch, **options)
        full = cca_attention(*own, window_size=prompt, **options)[:, :, : reading.full_until]
        out[:, :, : full.shape[2]] = full
    return out[0].transpose(0, 1)


def step(runner: Runner, requests: list[Request], counts: list[int], config: CCAConfig) -> int:
    """Run a step of all layers, compare its outputs, and return the tokens that were shared."""
    shared = 0
    runner.manager.new_step_starts()
    for request, count in zip(requests, counts):
        options = {}
        if not request.num_computed_tokens:
            pages, length = runner.manager.get_computed_blocks(request)[:2]
            options = {"num_new_computed_tokens": length, "new_computed_blocks": pages}
        assert runner.manager.allocate_slots(request, count, **options) is not None
        request.num_computed_tokens += options.get("num_new_computed_tokens", 0)
        shared += options.get("num_new_computed_tokens", 0)
    metadata = runner.metadata(requests, counts)
    spans = [(r.num_computed_tokens, r.num_computed_tokens + n) for r, n in zip(requests, counts)]
    context = SimpleNamespace(attn_metadata=metadata)
    hosts = [x.host.tokens for x in runner.layers.values() if getattr(x, "host", None)]
    caches = [*hosts, *(layer.kv_cache for layer in runner.layers.values())]
    for i, (name, layer) in enumerate(list(runner.layers.items())[:LAYERS]):
        q, k, v = (
            torch.cat(parts)
            for parts in zip(
                *[
                    [x[a:b] for x in tensors_of(list(r.all_token_ids), i)]
                    for r, (a, b) in zip(requests, spans)
                ]
            )
        )
        padding = torch.full((2, HEADS, DIM), torch.nan)
        out = torch.cat((torch.empty_like(q), padding))
        override = forward_context.override_forward_context(context)
        with override, bounds_check.reaching(*caches):
            layer.impl.forward(
                *(layer, torch.cat((q, padding)), k, v, layer.kv_cache, metadata[name]),
                output=out,
                output_scale=None,
                output_block_scale=None,
            )
        wanted = [
            expected(list(r.all_token_ids), i, config, r.num_prompt_tokens)[a:b]
            for r, (a, b) in zip(requests, spans)
        ]
        assert (out[: len(q)] - torch.cat(wanted)).abs().max() < 1e-5
    for request, count in zip(requests, counts):
        request.num_computed_tokens += count
    return shared


def run_requests(runner: Runner, settings: CCAConfig, page_tokens: int) -> None:
    """Run chunks, decoding tokens, and beginnings that are shared in multiples of a page."""
    tokens = [(7 * i) % 31 for i in range(40)]
    a, b = runner.request("a", tokens[:20]), runner.request("b", tokens[5:16])
    assert step(runner, [a, b], [14, 11], settings) == 0
    b.append_output_token_ids([3])
    assert step(runner, [b, a], [1, 6], settings) == 0
    a.append_output_token_ids([4, 5])
    c = runner.request("c", [*tokens[:17], 1, 2])
    shared = 16 // page_tokens * page_tokens
    assert step(runner, [a, c], [2, 19 - shared], settings) == shared
    runner.manager.free(a)
    runner.manager.free(c)
    d = runner.request("d", [*tokens[:13], 8])
    shared = 13 // page_tokens * page_tokens
    assert step(runner, [d], [14 - shared], settings) == shared


@pytest.mark.parametrize("mass", [False, True])
def test_chunks_decoding_tokens_and_shared_beginnings(make_layers, monkeypatch, mass):
    """With masses, chunks of 8 tokens are long ones."""
    if mass:
        monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 8)
    config = vllm_config(core_mass=mass)
    make_layers(config)
    settings = CCAConfig.saved_in(config.model_config.hf_text_config)
    run_requests(Runner(config, 40), settings, 12)  # a core page is 12 tokens


@pytest.mark.parametrize("full_until, slots", [(99, None), (13, None), (13, 0), (13, 1)])
def test_prompts_are_read_by_their_rule_and_answers_choose(
    make_layers, monkeypatch, full_until, slots
):
    """Chunks, a prompt's last token by itself, decoding tokens beside a chunk, drafts, and a
    beginning that is shared in multiples of a core page of two groups. Chunks begin at shares, and
    are longer than drafts where they share a choice."""
    device = torch.get_default_device().type
    monkeypatch.setitem(prompt_rule.PROMPT_LENGTHS, device, full_until)
    fetch = {"fetch_groups": 1, "fetch_index": "bits:2", "fetch_share": 6, "core_mass": True}
    if slots is not None:
        fetch |= {"store": "host", "fetch_slots": slots}
    config = vllm_config(group_size=4, window_size=5, sink_size=4, **fetch)
    config.speculative_config = SimpleNamespace(
        method="ngram",
        num_speculative_tokens=2,
        use_eagle=lambda: False,
        use_eagle_block_drop=lambda: False,
    )
    make_layers(config)
    settings = CCAConfig.saved_in(config.model_config.hf_text_config)
    runner = Runner(config, 60)
    tokens = [(7 * i) % 31 for i in range(40)]
    a, b = runner.request("a", tokens[:31]), runner.request("b", tokens[5:16])
    last = 1 if full_until > 31 else 7
    assert step(runner, [a, b], [31 - last, 11], settings) == 0
    b.append_output_token_ids([3])
    assert step(runner, [a, b], [last, 1], settings) == 0
    a.append_output_token_ids([4, 5, 6])
    b.append_output_token_ids([3])
    c = runner.request("c", [*tokens[:27], 1, 2])
    assert step(runner, [b, a, c], [1, 3, 5], settings) == 24
    for request in (a, c):
        request.append_output_token_ids([9, 8])
    assert step(runner, [c, a], [1, 2], settings) == 0


def test_a_step_waits_for_the_stores_of_the_one_before(make_layers, monkeypatch):
    waited = []
    monkeypatch.setattr(HostWrites, "wait", lambda self: waited.append(self))
    fetch = {"fetch_groups": 1, "fetch_index": "bits:2", "store": "host", "core_mass": True}
    config = vllm_config(group_size=4, window_size=5, sink_size=4, **fetch)
    make_layers(config)
    runner = Runner(config, 60)
    settings = CCAConfig.saved_in(config.model_config.hf_text_config)
    assert step(runner, [runner.request("a", [*range(9)])], [9], settings) == 0
    [cores] = {x.host_pages for x in runner.layers.values() if getattr(x, "host", None)}
    assert waited == [cores.writes]


def test_host_memory_that_holds_no_pages_of_raw_tokens_is_refused(make_layers, monkeypatch):
    """Pages of two groups, two layers: 2 x 2 x 8 x 32 numbers of 4 bytes."""
    fetch = {"fetch_groups": 1, "fetch_index": "bits:2", "store": "host", "core_mass": True}
    fetch["fetch_slots"] = 3
    config = vllm_config(group_size=4, window_size=5, sink_size=4, **fetch)
    config.additional_config = {host_pages.OPTION: 4096 * 21.5 / 2**30}
    make_layers(config)
    with pytest.raises(ValueError, match="--num-gpu-blocks-override 21, or more by"):
        Runner(config, 60)
    config.cache_config.num_gpu_blocks = None
    runner = Runner(config, 21)
    layer = runner.layers["model.layers.0.self_attn.attn.cores"]
    assert layer.host.tokens.shape == (21, KV_HEADS, 8, 2 * DIM)
    slots = layer.host.slots
    count = 3 * config.scheduler_config.max_num_seqs
    assert slots.tokens.shape == (KV_HEADS, count, 4, 2 * DIM)
    assert slots.table.shape == (21, 2, KV_HEADS)
    config.cache_config.num_gpu_blocks = None
    layer.bind_kv_cache(layer.kv_cache)
    assert layer.host.slots.tokens is slots.tokens and layer.host.slots.table is not slots.table
    assert layer.host.tokens.stride(0) == 0, "a run that measures memory has one page"
    pages = host_pages.HostPages(config, layer.spec, 1, 3)
    config.cache_config.gpu_memory_utilization = 0.9
    slot_bytes = 4 * 2 * DIM * 4 * KV_HEADS
    shared = min(9, count)
    # A page has two groups and the bytes of a slot; 70 pages leave no memory.
    for override, slots in ((None, shared), (1, shared), (30, 40), (70, shared)):
        config.cache_config.num_gpu_blocks_override = override
        assert pages.fitting(101 * slot_bytes, 10 * slot_bytes) == slots
    for value in ("much", 0, -1.5):
        config.additional_config = {host_pages.OPTION: value}
        message = f"core_context_host_gib must be a number more than 0, got {value!r}"
        with pytest.raises(ValueError, match=message):
            host_pages.HostPages(config, layer.spec, 1, 0)


def causal_within(q, k, v, batch, spec, out) -> None:
    """Attend causally within each sequence of a batch, as vLLM's FlashAttention does."""
    assert int(batch.starts.diff().max()) == batch.most_new
    heads = q.shape[1] // k.shape[1]
    for begin, end in itertools.pairwise(batch.starts.tolist()):
        own = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        own[1:] = (x.repeat_interleave(heads, 0) for x in own[1:])
        rows = scaled_dot_product_attention(*own, is_causal=True, scale=spec.scale)
        out[begin:end] = rows.transpose(0, 1)


@pytest.mark.parametrize("sizes", [3, ((1, 3), 3)])
def test_whole_prompts_that_see_no_core_token_have_causal_attention(
    make_layers, monkeypatch, sizes
):
    """Up to six tokens with a window of four and groups of three, alone and beside other kinds."""
    taken = []

    def attend(q, k, v, batch, spec, out):
        taken.append(batch.starts.diff().tolist())
        causal_within(q, k, v, batch, spec, out)

    monkeypatch.setattr(paged_backend, "flash_attention", lambda *inputs: attend)
    monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 9)
    config = vllm_config(layer_group_sizes=None if sizes == 3 else sizes)
    make_layers(config)
    settings = CCAConfig.saved_in(config.model_config.hf_text_config)
    runner = Runner(config, 60)
    tokens = [(7 * i) % 31 for i in range(90)]
    lengths = {"a": 6, "b": 7, "c": 2, "d": 6, "e": 14}
    requests = []
    for name, length in lengths.items():
        requests.append(runner.request(name, tokens[:length]))
        del tokens[:length]
    calls = LAYERS if sizes == 3 else LAYERS + 1
    assert step(runner, requests[:1], [6], settings) == 0
    assert taken == [[6]] * calls
    taken.clear()
    requests[0].append_output_token_ids([3])
    # A chunk of six tokens behind none is whole as long as it is all of its sequence.
    step(runner, requests, [1, 7, 2, 6, 6], settings)
    assert taken == [[2, 6, 6]] * calls
    taken.clear()
    step(runner, requests[-1:], [8], settings)
    assert not taken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's FlashAttention needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_prompts_by_flash_attention(dtype):
    q, k, v = (torch.randn(1500, heads, 128).to(dtype) for heads in (8, 2, 2))
    starts = torch.tensor([0, 7, 1031, 1031, 1500]).int()
    batch = Batch(starts, starts.diff(), 1024, 1024)
    spec = Spec(16, 1024, scale=0.1)
    attend = flash_attention(dtype, 128, q.device)
    out, wanted = torch.empty_like(q), torch.empty_like(q)
    attend(q, k, v, batch, spec, out)
    causal_within(q, k, v, batch, spec, wanted)
    assert (out - wanted).float().norm(dim=-1).max() < 3e-2 * wanted.float().norm(dim=-1).max()


def causal_behind(q, keys, values, starts, lengths, scale):
    """The attention of the last rows of sequences whose keys and values [T, Hkv, D] are given."""
    rows = []
    for (begin, end), k, v in zip(itertools.pairwise(starts), keys, values, strict=True):
        own = [x.transpose(0, 1).float() for x in (q[begin:end], k, v)]
        repeats = q.shape[1] // k.shape[1]
        own[1:] = [x.repeat_interleave(repeats, 0) for x in own[1:]]
        seen = torch.ones(end - begin, len(k)).tril(len(k) - (end - begin)).bool()
        rows.append(scaled_dot_product_attention(*own, seen, scale=scale).transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's FlashAttention needs a GPU")
def test_layers_share_a_plan_of_flash_attention():
    """Chunks of three sequences in pages of 16, one behind no tokens; then another step."""
    attend = flash_attention(torch.bfloat16, 128, torch.device("cuda"))
    for starts, lengths in (((0, 100, 700, 701), (2000, 600, 33)), ((0, 1024), (1024,))):
        most = max(b - a for a, b in itertools.pairwise(starts))
        batch = Batch(torch.tensor(starts).int(), torch.tensor(lengths).int(), most, max(lengths))
        blocks = -(-max(lengths) // 16)
        table = torch.randperm(len(lengths) * blocks).view(-1, blocks).int()
        for _ in range(3):  # layers
            q = torch.randn(starts[-1], 8, 128).bfloat16()
            cache = torch.randn(len(lengths) * blocks, 16, 2, 256).bfloat16()
            k, v = cache.chunk(2, -1)
            out = torch.empty_like(q)
            attend(q, k, v, batch, Spec(16, 1024, scale=0.1), out, table)
            rows = [[x[row].flatten(0, 1)[:n] for row, n in zip(table, lengths)] for x in (k, v)]
            wanted = causal_behind(q, *rows, starts, lengths, 0.1)
            assert (out - wanted).float().norm(dim=-1).max() < 3e-2 * wanted.norm(dim=-1).max()


@pytest.mark.parametrize("version, plans", [(3, 3), (2, 0)])
def test_flash_attention_plans_once_a_step(monkeypatch, version, plans):
    """For all layers; anew for another batch, and for layers of another size."""
    from vllm.v1.attention.backends import fa_utils

    made, taken = [], []

    def plan(**sizes):
        made.append(sizes)
        return torch.full((1,), len(made))

    monkeypatch.setattr(fa_utils, "get_scheduler_metadata", plan, raising=False)
    monkeypatch.setattr(
        fa_utils, "flash_attn_varlen_func", lambda *_, **given: taken.append(given), raising=False
    )
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: version, raising=False)
    attend = flash_attention(torch.bfloat16, 128, torch.device("cuda"))
    starts = torch.tensor([0, 5])
    batches = [Batch(starts, torch.tensor([7]), 5, 9) for _ in range(2)]
    pages = torch.zeros(3, 16, 2, 128)
    table = torch.zeros(1, 1)
    for batch, heads in ((batches[0], 4), (batches[0], 4), (batches[1], 4), (batches[1], 8)):
        q = torch.zeros(5, heads, 128)
        attend(q, pages, pages, batch, Spec(16, 1024, scale=0.1, softcap=2.0), q, table)
    assert len(made) == plans
    assert [x.get("scheduler_metadata") for x in taken] == ([1, 1, 2, 3] if plans else [None] * 4)
    for sizes in made:
        assert sizes["page_size"] == 16 and sizes["max_seqlen_k"] == 9 and sizes["has_softcap"]
    attend(q, q, q, batches[0], Spec(16, 1024, scale=0.1), q)
    assert "scheduler_metadata" not in taken[-1]


def test_flash_attention_takes_half_precision_on_a_gpu():
    assert flash_attention(torch.bfloat16, 128, torch.device("cpu")) is None
    assert flash_attention(torch.float32, 128, torch.device("cuda")) is None


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize(
    "sizes, groups", [(((1, 3), 3), 5), (((3, 1), 1), 5), ((3, 1), 3), (((3, 1), (1, 3)), 3)]
)
def test_heads_that_keep_every_token(make_layers, monkeypatch, sizes, groups, mass):
    """With masses, chunks of 8 tokens are long ones, and pages of such heads have empty room."""
    if mass:
        monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 8)
    config = vllm_config(layer_group_sizes=sizes, core_mass=mass)
    make_layers(config)
    runner = Runner(config, 60)
    assert len(runner.caches.kv_cache_groups) == groups
    settings = CCAConfig.saved_in(config.model_config.hf_text_config)
    run_requests(runner, settings, 12 if sizes == (3, 1) else 24)  # pages are 4 or 8 raw tokens


def test_ranks_have_the_same_caches_and_heads_of_their_own(make_layers, monkeypatch):
    """Three heads that keep every token, two of them on the first of two ranks."""
    plans = []
    for rank in range(2):
        config = vllm_config(layer_group_sizes=((1, 3), 1))
        config.parallel_config.tensor_parallel_size = 2
        monkeypatch.setattr(cache_plan, "get_tensor_model_parallel_rank", lambda: rank)
        layers = make_layers(config, kv_heads=1)
        table = config.compilation_config.static_forward_context
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in table.items()}
        held = [
            [(cache.layer_name, share.heads) for cache, share in layer.impl.caches.raw]
            for layer in layers
        ]
        plans.append((specs, held))
    assert plans[0][0] == plans[1][0]
    names = ["model.layers.0.self_attn.attn.raw_1", "model.layers.1.self_attn.attn"]
    assert plans[0][1] == [[(names[1], (0,))], [(names[0], (0,))]]
    assert plans[1][1] == [[], [(names[1], (0,))]]


@pytest.mark.parametrize("mass", [False, True])
def test_pages_have_the_bytes_that_info_counts(make_layers, mass):
    config = vllm_config(core_mass=mass)
    [layer, _] = make_layers(config)
    hf = config.model_config.hf_text_config
    cost = replace(ModelCost.of(hf), num_layers=1, itemsize=4)
    spec = layer.get_kv_cache_spec(config)
    assert capacity.page_bytes(cost, settings_of(hf)) * PAGE == 16 * spec.page_size_bytes


def test_a_run_that_measures_memory_writes_zeros_and_makes_tables(make_layers):
    [layer, _] = make_layers(vllm_config())
    out = torch.ones(3, HEADS, DIM)
    layer.impl.forward(layer, out, out[:, :1], out[:, :1], layer.kv_cache, None, output=out)
    assert not out.any()
    assert pool._TABLES[layer.impl.spec.rotary.inv_freq]


def test_a_run_that_measures_memory_gathers_the_entries_of_the_longest_chunk(
    make_layers, monkeypatch
):
    """128 tokens, of which ten are new."""
    spans = []

    def gather(new, span, *others):
        spans.append(span)
        return gather_chunk(new, span, *others)

    monkeypatch.setattr(paged_chunk, "gather_chunk", gather)
    monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 10)
    [layer, _] = make_layers(vllm_config(core_mass=True, head_group_sizes=(3, 1)))
    for count in (9, 10):
        out = torch.ones(count, HEADS, DIM)
        layer.impl.forward(layer, out, out[:, :1], out[:, :1], layer.kv_cache, None, output=out)
        assert not out.any()
    compact = Span(low=114, past=118, end=128, sinks=3, first_group=1, cores=40)
    every_token = Span(low=0, past=118, end=128, sinks=0, first_group=0, cores=0)
    assert spans[::2] == [compact, every_token]
    assert not any(span.past or span.cores for span in spans[1::2])


def builder_of(config: SimpleNamespace, names: str = "") -> paged_backend.BatchBuilder:
    """Make the builder of a cache of windows."""
    spec = SimpleNamespace(head_size=DIM, block_size=4, page_size_bytes=64)
    return paged_backend.BatchBuilder(spec, names, config, torch.get_default_device())


def common_of(lengths: list[int], count: int) -> SimpleNamespace:
    """Metadata of vLLM for `count` new tokens of each sequence."""
    return SimpleNamespace(
        query_start_loc=torch.arange(len(lengths) + 1).int() * count,
        seq_lens=torch.tensor(lengths).int(),
        max_query_len=count,
        max_seq_len=max(lengths),
        num_actual_tokens=len(lengths) * count,
        block_table_tensor=None,
        slot_mapping=torch.arange(8),
    )


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_every_layer_of_a_group_has_its_pages(names):
    config = vllm_config()
    for name, size in (("a", 64), ("b", 32)):
        spec = SimpleNamespace(block_size=4, page_size_bytes=size)
        layer = SimpleNamespace(get_kv_cache_spec=lambda config, spec=spec: spec)
        config.compilation_config.static_forward_context[name] = layer
    with pytest.raises(ValueError, match="tokens and bytes of a page"):
        builder_of(config, names)


def test_a_captured_step_has_short_sequences():
    config = vllm_config()
    config.speculative_config = SimpleNamespace(num_speculative_tokens=1)
    builder = builder_of(config)
    common = common_of([90, 90], 2)
    metadata = builder.build_for_cudagraph_capture(common)
    assert len(metadata.slots) == 4
    assert common.seq_lens.tolist() == [2, 2]


def test_the_warm_up_of_a_captured_step_runs_its_kernels():
    """Kernels depend on the longest length: for decoding steps it is the model's in all steps."""
    builder = builder_of(vllm_config())
    assert builder.build(0, common_of([1, 1], 1)).batch.longest == 128
    assert builder.build_for_cudagraph_capture(common_of([90, 90], 1)).batch.longest == 128
    assert builder.build(0, common_of([40, 90], 2)).batch.longest == 90


def test_decoding_sequences_have_as_many_tokens_as_drafts_allow(monkeypatch):
    """Beside a long chunk, a decoding sequence and a short chunk are parts of their own."""
    monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 10)
    config = vllm_config()
    starts = torch.tensor([0, 6, 13, 25]).int()
    lengths = torch.tensor([50, 60, 70]).int()
    common = SimpleNamespace(**vars(common_of([50, 60, 70], 12)))
    common.query_start_loc = common.query_start_loc_cpu = starts
    common.seq_lens = common.seq_lens_cpu_upper_bound = lengths
    for drafts, ends in ((5, [1, 2, 3]), (2, [2, 3])):
        config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts)
        builder = builder_of(config)
        parts = builder.build(0, common).parts
        assert [part.sequences.stop for part in parts] == ends


def test_the_first_step_compiles_what_later_ones_may_need(make_layers, monkeypatch):
    """Once for core tokens and once for heads that keep every token, in no graph's capture."""
    compiled, prompts = [], []
    capturing = [True] * LAYERS
    monkeypatch.setattr(paged_backend, "is_captured", lambda x: bool(capturing and capturing.pop()))
    monkeypatch.setattr(
        paged_backend,
        "compile_for_any_batch",
        lambda q, raw, cores, spec: compiled.append(spec.window_size),
    )
    monkeypatch.setattr(
        paged_backend,
        "compile_for_any_prompt",
        lambda q, new, raw, cores, spec: prompts.append(spec.window_size),
    )
    sizes = ((1, 3), 3)
    config = vllm_config(layer_group_sizes=sizes)
    make_layers(config)
    runner = Runner(config, 60)
    settings = CCAConfig.saved_in(config.model_config.hf_text_config)
    request = runner.request("a", list(range(9)))
    for count, after in ((3, 0), (4, 3), (2, 3)):
        step(runner, [request], [count], settings)
        assert len(compiled) == after
    assert sorted(compiled) == [4, 4, 128]
    assert prompts == [4, 4]


def test_a_layer_keeps_no_cache_that_vllm_frees(make_layers):
    """As those of the run that measures the memory of captured steps."""
    config = vllm_config()
    make_layers(config)
    runner = Runner(config, 20)
    step(runner, [runner.request("a", [1, 2, 3])], [3], TINY)
    layers = runner.layers.values()
    caches = [weakref.ref(layer.kv_cache) for layer in layers]
    for layer in layers:
        layer.kv_cache = torch.tensor([])
    gc.collect()
    assert not any(cache() is not None for cache in caches)


def test_other_architectures_are_refused():
    config = hf_config()
    config.architectures = ["Gemma3ForCausalLM"]
    with pytest.raises(ValueError, match="^architectures must hold one of .* `corecontext serve`"):
        settings_of(config)


@pytest.mark.parametrize(
    "option, value, message",
    [
        (
            "kv_transfer_config",
            SimpleNamespace(kv_connector="CoreContextConnector"),
            "got core tokens alone, which .* Leave out --kv-transfer-config",
        ),
        ("speculative_config", SimpleNamespace(method="eagle"), "must be 'ngram'"),
        (
            "scheduler_config",
            SimpleNamespace(disable_hybrid_kv_cache_manager=True),
            "Leave out --disable-hybrid-kv-cache-manager",
        ),
    ],
)
def test_options_of_the_server_are_refused(make_layers, option, value, message):
    config = vllm_config()
    setattr(config, option, value)
    with pytest.raises(ValueError, match=message):
        make_layers(config)


@pytest.mark.parametrize(
    "store, connector, message",
    [
        ("device", "CoreContextConnector", None),
        ("device", "OffloadingConnector", "^kv_connector must be 'CoreContextConnector'"),
        ("host", "CoreContextConnector", "got raw tokens in host memory, which .* 'device'.$"),
    ],
)
def test_pages_are_offloaded_with_fetch_from_the_device_alone(store, connector, message):
    config = CCAConfig.preset("default").replace(store=store)
    server = vllm_config()
    server.kv_transfer_config = SimpleNamespace(kv_connector=connector)
    if message is None:
        check_server(server, config)
        return
    with pytest.raises(ValueError, match=message):
        check_server(server, config)


def test_a_page_is_offloaded_when_its_last_group_has_an_index():
    """That of group c is written when group c + 3 is complete, and none before the centre."""
    config = CCAConfig.pooling(group_size=4, window_size=18, sink_size=4, core_mass=True)
    config = config.replace(fetch_groups=2, fetch_index="bits:2", store="device")
    found = [complete_tokens(config, computed) for computed in (0, 19, 20, 24, 100)]
    assert found == [0, 0, 8, 12, 88]


def test_a_release_that_counts_pages_otherwise_is_told(monkeypatch):
    def start(connector, *args):
        connector.connector_scheduler = SimpleNamespace()

    monkeypatch.setattr(offloading.OffloadingConnector, "__init__", start)
    with pytest.raises(ValueError, match="^vLLM must count .* Leave out --kv-transfer-config"):
        offloading.CoreContextConnector(vllm_config())


def test_all_bytes_of_a_page_of_core_tokens_are_offloaded(make_layers):
    """Its index and masses are behind keys and values."""
    config = vllm_config(fetch_groups=1, fetch_index="bits:2", core_mass=True, store="device")
    [layer, _] = make_layers(config)
    for spec in (layer.get_kv_cache_spec(config), layer.impl.caches.cores.spec):
        assert spec.unpadded_page_size_bytes == spec.page_size_bytes


def test_a_layer_tells_vllm_what_may_be_rejected_and_what_it_takes(make_layers):
    config = vllm_config()
    config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=3)
    [layer, _] = make_layers(config)
    window = layer.get_kv_cache_spec(config)
    assert window.drafts == 3 and window.layout.sinks == 3
    most = window.max_admission_blocks_per_request(6, 99)
    assert most == window.layout.most_window_pages(9, 99) > window.layout.most_window_pages(6, 99)
    assert layer.impl.spec.softcap is None
    kind = paged_backend.CoreContextAttention
    assert kind(HEADS, DIM, 1.0, KV_HEADS, logits_soft_cap=30.0).spec.softcap == 30.0
    with pytest.raises(ValueError, match="got attn_type encoder_only"):
        kind(HEADS, DIM, 1.0, KV_HEADS, attn_type="encoder_only")
    with pytest.raises(ValueError, match="got alibi_slopes"):
        kind(HEADS, DIM, 1.0, KV_HEADS, [0.5, 0.25])
    backend = paged_backend.CoreContextBackend
    assert backend.supports_kv_connector()
    assert set(backend.supported_kv_cache_dtypes) == {"auto", "float16", "bfloat16"}


def test_layers_with_a_window_of_their_own_are_refused(make_layers):
    config = vllm_config()
    config.cache_config.sliding_window = 8
    with pytest.raises(ValueError, match="plain causal attention .*, got sliding_window"):
        make_layers(config)
