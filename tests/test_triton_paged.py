"""The kernels over block tables against the reference: on the GPU where there is one, else in
Triton's interpreter."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton")

import bounds_check

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache.host_memory import host_zeros
from corecontext.integrations.vllm import host_writes
from corecontext.integrations.vllm.host_writes import HostWrites
from corecontext.integrations.vllm.page_layout import PageLayout
from corecontext.ops.spec import Spec
from corecontext.ops.triton.decode import merge_parts
from corecontext.ops.triton.paged import attend_pages as paged_attend
from corecontext.ops.triton.paged import batch_parts
from corecontext.ops.triton.paged import chunk as paged_chunk
from corecontext.ops.triton.paged import pool_pages as paged_pool
from corecontext.ops.triton.paged import store_tokens as paged_store
from corecontext.ops.triton.paged.attend_pages import attend_pages, compile_for_any_batch
from corecontext.ops.triton.paged.batch_parts import Kind, attend_parts, parts_of
from corecontext.ops.triton.paged.copy_tokens import copy_tokens
from corecontext.ops.triton.paged.gather import Span, gather_chunk
from corecontext.ops.triton.paged.pages import Batch, Pages, alignment_of
from corecontext.ops.triton.paged.pool_pages import PoolPlan, pool_pages
from corecontext.ops.triton.tiles import Chip, PoolTiles, Tiles

pytestmark = pytest.mark.usefixtures("default_device")
WORST = {
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # of the largest row's norm, in any row
DIM, SHARE = 16, 3  # head size, query heads of a KV head


class Cache:
    """Pages in random places for several sequences; those of nobody hold NaN."""

    def __init__(self, layout: PageLayout, lengths: list[int], dtype, mass: bool, kv_heads=1):
        self.layout = layout
        generator = torch.Generator("cpu").manual_seed(0)
        default = torch.get_default_device()
        size = layout.page_size
        windows = [-(-length // size) for length in lengths]
        cores = [len(layout.core_pages(length)) for length in lengths]
        num_pages = sum(windows) + sum(cores) + 3
        order = torch.randperm(num_pages, generator=generator, device="cpu").tolist()
        # As in vLLM, both kinds of pages are in one tensor, keys and values of a page together.
        memory = torch.full((num_pages, 2, kv_heads, size, DIM), torch.nan, dtype=dtype)
        k, v = (memory[:, i].transpose(1, 2) for i in (0, 1))
        masses = torch.full((num_pages, size, kv_heads), torch.nan) if mass else None
        self.window = [[order.pop() for _ in range(count)] for count in windows]
        self.raw = Pages(k, v, self.table(self.window, default))
        table = self.table([[order.pop() for _ in range(count)] for count in cores], default)
        few = layout.core_entries or size
        masses = None if masses is None else masses[:, :few]
        self.cores = Pages(k[:, :few], v[:, :few], table, masses)

    @staticmethod
    def table(rows: list[list[int]], device) -> torch.Tensor:
        """Rows of page numbers, the missing ones of no page."""
        most = max(map(len, rows))
        rows = [row + [2**30] * (most - len(row)) for row in rows]
        return torch.tensor(rows, dtype=torch.int32, device=device)

    def rows(self, chosen: list[int]) -> tuple[Pages, Pages]:
        """The pages of some sequences."""
        return tuple(pages._replace(table=pages.table[chosen]) for pages in (self.raw, self.cores))

    def slots(self, sequence: int, start: int, end: int) -> list[int]:
        size = self.layout.page_size
        return [self.window[sequence][p // size] * size + p % size for p in range(start, end)]

    def drop(self, sequence: int, computed: int) -> None:
        """Overwrite window pages that no later query reads."""
        kept = self.layout.window_pages(computed, computed)
        for number in range(computed // self.layout.page_size):
            if number not in kept:
                page = self.window[sequence][number]
                self.raw.k[page] = torch.nan
                self.raw.v[page] = torch.nan


def sequences_of(lengths, dtype, kv_heads=1):
    """q, k and v of each sequence, [length, heads, D]."""
    generator = torch.Generator("cpu").manual_seed(1)
    default = torch.get_default_device()
    return [
        [
            torch.randn(n, h, DIM, generator=generator, device="cpu").to(default, dtype)
            for h in (SHARE * kv_heads, kv_heads, kv_heads)
        ]
        for n in lengths
    ]


def spaced(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same numbers with a gap behind each row: q, k and v have strides of their own."""
    return torch.nn.functional.pad(x, (0, gap))[..., : x.shape[-1]]


def served(config, rotary, qkv, steps, dtype, softcap=None, page_size=4):
    """Outputs of all sequences, whose new tokens of each step are {sequence: count}."""
    lengths = [len(q) for q, _, _ in qkv]
    spec = Spec.of(config, rotary, DIM**-0.5, softcap)
    kv_heads = qkv[0][1].shape[1]
    layout = PageLayout.of(config, page_size, core_entries=page_size // 2)
    cache = Cache(layout, lengths, dtype, config.core_mass, kv_heads)
    computed = [0] * len(qkv)
    outs = [torch.full_like(q, torch.nan) for q, _, _ in qkv]
    for step in steps:
        for i in step:
            cache.drop(i, computed[i])
        spans = {i: (computed[i], computed[i] + count) for i, count in step.items()}
        q, k, v = (
            spaced(torch.cat([qkv[i][j][a:b] for i, (a, b) in spans.items()]), 4 * j)
            for j in range(3)
        )
        q = q.mT.contiguous().mT  # of any layout
        slots = torch.tensor([s for i, span in spans.items() for s in cache.slots(i, *span)])
        counts = torch.tensor([0, *step.values()])
        batch = Batch(
            counts.cumsum(0).int(),
            torch.tensor([b for _, b in spans.values()]).int(),
            max(step.values()),
            max(b for _, b in spans.values()),
        )
        raw, cores = cache.rows(list(step))
        plan = PoolPlan.of(raw, cores, spec, q.shape[1])
        pool_pages(q, (k, v, slots), batch, (raw.table, cores.table), plan)
        parts = parts_of(counts.cumsum(0).tolist(), batch.lengths.tolist(), batch)
        out = torch.full(q.shape, torch.nan, dtype=dtype)
        attend_parts((q, k, v), parts, raw, cores, spec, out)
        for rows, (i, (a, b)) in zip(out.split(list(step.values())), spans.items()):
            outs[i][a:b] = rows
            computed[i] = b
    assert computed == lengths
    return outs


def reference(config, rotary, qkv, softcap=None):
    """Outputs of one sequence by itself, in float64."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in qkv)
    return cca_attention(
        *(q, k, v),
        group_size=config.group_size,
        window_size=config.window_size,
        sink_size=config.sink_size,
        core_position=config.core_position,
        core_mass=config.core_mass,
        rotary=rotary,
        softcap=softcap,
        backend="reference",
    )[0].transpose(0, 1)


def check(config, rotary, steps, dtype=torch.float32, kv_heads=1, **options):
    """Every output row of every sequence equals the reference's."""
    lengths = [sum(step.get(i, 0) for step in steps) for i in range(1 + max(map(max, steps)))]
    qkv = sequences_of(lengths, dtype, kv_heads)
    outs = served(config, rotary, qkv, steps, dtype, **options)
    options.pop("page_size", None)
    for out, tensors in zip(outs, qkv):
        expected = reference(config, rotary, tensors, **options)
        assert out.isfinite().all()
        rows = (out.double() - expected).norm(dim=-1)
        assert rows.max() <= WORST[dtype] * expected.norm(dim=-1).max()


def halves() -> Rotary:
    return Rotary.from_theta(100.0, DIM)


@pytest.mark.parametrize("sinks, window", [(0, 6), (4, 5), (7, 1)])
def test_a_ragged_batch_of_chunks_and_decoding_tokens(sinks, window):
    """A prompt, chunks that begin within a group, decoding tokens, tokens with drafts."""
    config = CCAConfig.pooling(group_size=4, window_size=window, sink_size=sinks)
    check(config, halves(), [{0: 15, 1: 5}, {1: 6, 0: 1}, {0: 3, 1: 1, 2: 9}])


def test_programs_share_the_entries_of_a_block(monkeypatch):
    monkeypatch.setattr(paged_attend, "decode_splits", lambda *sizes: 3)
    monkeypatch.setattr(paged_attend, "paged_tiles", lambda *sizes: Tiles(16, 16, 4, 1))
    config = CCAConfig.pooling(group_size=3, window_size=12, sink_size=3)
    check(config, halves(), [{0: 46}, {0: 2, 1: 1}])


def test_programs_are_as_many_as_entries_allow(monkeypatch):
    monkeypatch.setattr(paged_attend, "decode_splits", lambda chip, count, entries, block: entries)
    spec = Spec(4, 9, 0.25, sink_size=8)
    q = torch.zeros(6, SHARE, DIM)
    for longest, entries in ((400, 8 + 9 + 4 + 5 + 100), (20, 20)):
        batch = Batch(torch.tensor([0, 1, 6]), torch.tensor([7, longest]), 5, longest)
        assert paged_attend._num_parts(q, 1, batch, spec, Tiles(16, 16, 4, 2)) == entries
    assert {x.dtype for x in paged_attend._parts(q.half(), 1, 3)} == {torch.float32}


def test_masses_and_softcap():
    config = CCAConfig.pooling(group_size=3, window_size=4, sink_size=3, core_mass=True)
    check(config, halves(), [{0: 14}, {0: 1, 1: 8}], kv_heads=2, softcap=2.0)


def test_half_precision_without_rotation():
    config = CCAConfig.pooling(group_size=4, window_size=5, sink_size=4, core_position="token")
    check(config, None, [{0: 18}, {0: 1}], torch.float16)


def test_a_long_past_has_tiles_without_a_mask(monkeypatch):
    tiles = Tiles(32, 16, 4, 1)
    monkeypatch.setattr(paged_attend, "paged_tiles", lambda *sizes: tiles)
    config = CCAConfig.pooling(group_size=2, window_size=16, sink_size=2)
    check(config, halves(), [{0: 70}, {0: 3}], page_size=8)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("pairs, interleaved", [(3, True), (8, True), (5, False), (8, False)])
def test_a_group_is_pooled_in_blocks_of_tokens(monkeypatch, blocks, pairs, interleaved):
    """Where all columns rotate, or the first ones."""
    tiles = PoolTiles(blocks == 1, 1, 16 if blocks == 1 else 4, DIM, 1)
    monkeypatch.setattr(paged_pool, "pool_tiles", lambda *sizes, **options: tiles)
    rotary = Rotary(halves().inv_freq[:pairs], interleaved=interleaved)
    config = CCAConfig.pooling(group_size=10, window_size=1, sink_size=0, core_mass=True)
    check(config, rotary, [{0: 15, 1: 12}, {0: 8}])


def test_the_compiler_is_told_an_alignment_that_every_entry_has():
    x = torch.zeros(2, 3, 4, 16, dtype=torch.float16)
    assert x.data_ptr() % 16 == 0 and alignment_of(x, x) == 16
    assert alignment_of(x, x[..., 2:]) == 4
    assert alignment_of(x, x.view(-1)[:360].view(2, 3, 5, 12)) == 8
    assert alignment_of(x, x[:, :, 1:, 3:]) == 2


@pytest.mark.parametrize("sinks, window, mass, long", [(0, 6, False, 4), (7, 1, True, 8)])
def test_entries_of_long_chunks_are_gathered(monkeypatch, sinks, window, mass, long):
    """Beside decoding tokens and short chunks, at lengths before and behind the first core token
    and the first tokens."""
    monkeypatch.setattr(paged_chunk, "LONG_CHUNK", long)
    config = CCAConfig.pooling(group_size=4, window_size=window, sink_size=sinks, core_mass=mass)
    steps = [{0: 5, 1: 1}, {1: 1, 2: 15, 3: 9, 0: 4}, {0: 2, 2: 1, 1: 3, 3: 5}, {0: 6, 2: 1, 1: 5}]
    check(config, halves(), steps, kv_heads=2)


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("past, sinks", [(0, 4), (9, 4), (70, 8), (71, 0)])
def test_a_chunk_gets_each_entry_once(past, sinks, mass):
    """Raw tokens before it and its own, first tokens, core tokens and their masses, bit for bit."""
    num_new, kv_heads, page_size = 5, 2, 8
    spec = Spec(4, 6, scale=1.0, sink_size=sinks, core_mass=mass)
    end = past + num_new
    pages = torch.randn(4, 40, kv_heads, page_size, DIM)
    raw_k, raw_v, core_k, core_v = pages.transpose(2, 3)
    masses = torch.rand(40, page_size, kv_heads) if mass else None
    table, core_table = torch.randperm(40)[:20].int().view(2, 1, -1)
    raw, cores = Pages(raw_k, raw_v, table), Pages(core_k, core_v, core_table, masses)
    # The new tokens lie between others, as in the output of a joint product.
    new = torch.randn(num_new, 3, kv_heads, DIM)[:, 1:].unbind(1)
    span = Span.of(past, num_new, spec)
    k, v, far = gather_chunk(new, span, raw, cores, spec)

    assert span.low == max(0, (past - 5) // 4 * 4)
    groups = (end - 6) // 4
    assert (span.sinks, span.cores) == ((sinks, groups - sinks // 4) if groups > 0 else (0, 0))
    group = torch.arange(span.first_group, span.first_group + span.cores)
    for got, of_new, pages, of_cores, listed in (
        (k, new[0], raw.k, cores.k, far.k),
        (v, new[1], raw.v, cores.v, far.v),
    ):
        before = pages[table[0].long()].flatten(0, 1)
        near = torch.cat((before[span.low : past], of_new))
        assert torch.equal(got, near.transpose(0, 1))
        entries = of_cores[core_table[0].long()].flatten(0, 1)[group]
        wanted = torch.cat((before[: span.sinks], entries))
        assert torch.equal(listed, wanted.transpose(0, 1))
    if not mass:
        assert far.mass is None
        return
    wanted = masses[core_table[0].long()].flatten(0, 1)[group].T
    assert torch.equal(far.mass[:, span.sinks :], wanted)
    assert not far.mass[:, : span.sinks].any()


def test_a_batch_is_split_at_its_long_chunks(monkeypatch):
    monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 4)
    counts = torch.tensor([1, 2, 6, 4, 3, 0, 0], device="cpu")
    starts = [0, *counts.cumsum(0).tolist()]
    batch = Batch(torch.tensor(starts), 10 + counts, 6, 16)
    parts = parts_of(starts, batch.lengths.tolist(), batch, 3)
    assert [part.sequences for part in parts] == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 7),
    ]
    assert [part.tokens for part in parts] == [
        slice(0, 3),
        slice(3, 9),
        slice(9, 13),
        slice(13, 16),
    ]
    assert [part.past for part in parts if part.kind is Kind.LONG] == [10, 10]
    assert parts[0].batch.most_new == 2 and parts[3].batch.starts.tolist() == [0, 3, 3, 3]
    assert parts[3].batch.lengths.tolist() == [13, 10, 10]


def test_decoding_sequences_beside_a_short_chunk_keep_their_tiles(monkeypatch):
    """Otherwise each of them would take the tile of the chunk's many rows."""
    monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 40)
    starts = [0, 1, 5, 6, 26, 76, 82]
    batch = Batch(torch.tensor(starts), torch.tensor([90] * 6), 50, 90)
    parts = parts_of(starts, batch.lengths.tolist(), batch, 4)
    assert [part.batch.most_new for part in parts] == [4, 20, 50, 6]
    kinds = [Kind.DECODING, Kind.SHORT, Kind.LONG, Kind.SHORT]
    assert [part.kind for part in parts] == kinds
    assert [part.sequences.stop for part in parts] == [3, 4, 5, 6]


def test_whole_prompts_are_parts_up_to_a_length(monkeypatch):
    """Neighbours together; not one with a past, nor one that is longer."""
    monkeypatch.setattr(paged_chunk, "LONG_CHUNK", 40)
    counts = torch.tensor([1, 30, 31, 30, 60, 20, 2, 9], device="cpu")
    starts = [0, *counts.cumsum(0).tolist()]
    lengths = [1, 30, 31, 31, 60, 20, 2, 9]
    batch = Batch(torch.tensor(starts), torch.tensor(lengths), 60, 60)
    parts = parts_of(starts, lengths, batch, 2, 30)
    assert [(part.kind, part.sequences.start, part.sequences.stop) for part in parts] == [
        (Kind.DECODING, 0, 1),
        (Kind.WHOLE, 1, 2),
        (Kind.SHORT, 2, 4),
        (Kind.LONG, 4, 5),
        (Kind.WHOLE, 5, 6),
        (Kind.DECODING, 6, 7),
        (Kind.WHOLE, 7, 8),
    ]
    assert parts[1].batch.starts.tolist() == [0, 30]
    # Prompts whose later tokens share a choice are read one by one.
    sharing = parts_of(starts, lengths, batch, 2, 0, full_until=30)
    letters = {Kind.DECODING: "d", Kind.SHORT: "s", Kind.SHARING: "S"}
    assert "".join(letters[part.kind] for part in sharing) == "dsSSSsds"
    assert [part.past for part in sharing] == [0, 0, 0, 1, 0, 0, 0, 0]
    taken = {"attend_pages": [], "attend_chunk": [], "whole": []}
    for module, name in ((batch_parts, "attend_pages"), (paged_chunk, "attend_chunk")):
        take = taken[name].append
        monkeypatch.setattr(module, name, lambda q, *rest, take=take: take(len(q)))
    x = torch.zeros(starts[-1], 1, 1)
    pages = Pages(x, x, torch.zeros(len(counts), 1))
    take = taken["whole"].append
    attend_parts((x, x, x), parts, pages, pages, None, x, lambda q, *rest: take(len(q)))
    assert taken == {"attend_pages": [1, 61, 2], "attend_chunk": [3], "whole": [30, 20, 9]}


def test_padding_of_a_captured_batch_changes_nothing():
    """Sequences without tokens and tokens of no sequence, as the padding of a CUDA graph."""
    config = CCAConfig.pooling(group_size=2, window_size=3, sink_size=0)
    [qkv] = sequences_of([9], torch.float32)
    spec = Spec.of(config, halves(), DIM**-0.5)
    cache = Cache(PageLayout.of(config, 4), [9], torch.float32, config.core_mass)
    raw, cores = cache.rows([0, 0, 0])
    raw.k.fill_(7)  # a mark of entries that nothing wrote
    q, k, v = (torch.cat((x, torch.full_like(x[:3], torch.nan))) for x in qkv)
    slots = torch.tensor([*cache.slots(0, 0, 9), -1, -1, -1])
    batch = Batch(torch.tensor([0, 9, 9, 9]).int(), torch.tensor([9, 0, 0]).int(), 9, 9)
    plan = PoolPlan.of(raw, cores, spec, q.shape[1])
    pool_pages(q, (k, v, slots), batch, (raw.table, cores.table), plan)
    out = attend_pages(q, batch, raw, cores, spec)[:9]
    assert (out - reference(config, halves(), qkv)).abs().max() < 1e-5
    written = (raw.k != 7).any(-1)
    assert int(written.sum()) == 9 + 4  # tokens and core tokens, nothing else


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 20, 50])
def test_tokens_are_in_host_memory_when_the_next_step_begins(monkeypatch, kv_heads, count):
    """Few are stored by the last layer for all, many by each layer, on a stream of their own."""
    device = torch.get_default_device()
    monkeypatch.setattr(paged_store, "STORED_BYTES", 256)
    monkeypatch.setattr(host_writes, "PROGRAMS", 2)
    monkeypatch.setattr(host_writes, "FEWEST", 8)
    writes = HostWrites(most_captured=20)
    assert writes.fewest == 21
    new = torch.randn(3, 2, count, kv_heads, DIM)
    slots, far_slots = torch.randperm(64)[:count], torch.randperm(60)[:count]
    far_slots[3::7] = -1
    # Of three layers keys and values, which alternate; pages of 4 tokens, in host memory of 5.
    raw = torch.randn(3, 16, 4, kv_heads, 2, DIM)
    far = host_zeros((3, 12, kv_heads, 5, 2, DIM), raw.dtype, device).transpose(2, 3)
    wanted = torch.zeros(3, 60, kv_heads, 2, DIM)
    stored = far_slots >= 0
    wanted[:, far_slots[stored]] = new[:, :, stored].permute(0, 2, 3, 1, 4)
    for number in range(3):
        k, v = new[number]
        raw[number].flatten(0, 1)[slots] = new[number].permute(1, 2, 0, 3)
        pages = [Pages(x[number][..., 0, :], x[number][..., 1, :], slots) for x in (raw, far)]
        with bounds_check.reaching(raw, far):
            writes.store((k, v), (slots, far_slots), pages, is_last=number == 2)
    slots.fill_(0)  # the next step writes its own
    far_slots.fill_(0)
    writes.wait()
    assert far.flatten(1, 2).equal(wanted)  # nothing else is written
    assert (writes.stream is not None) == (device.type == "cuda")
    assert not writes.layers


def test_stores_of_few_tokens_outlast_their_step(monkeypatch):
    """As on a GPU, whose other stream runs when the next step waits for it: that step may have
    written its own slots by then."""
    later = []
    side = SimpleNamespace(device=None, wait_stream=lambda other: None)

    def wait_stream(stream):
        assert stream is side
        while later:
            later.pop(0)()

    current = SimpleNamespace(device=None, wait_stream=wait_stream)
    monkeypatch.setattr(host_writes, "on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: side)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(
        host_writes, "copy_tokens", lambda *given: later.append(lambda: copy_tokens(*given))
    )
    raw, far = torch.randn(2, 2, 4, 4, 1, DIM), torch.zeros(2, 2, 4, 4, 1, DIM)
    slots, far_slots = torch.randperm(16)[:5], torch.randperm(16)[:5]
    places = (slots.clone(), far_slots.clone())
    writes = HostWrites(most_captured=0)
    for layer in range(2):
        pages = [Pages(x[layer, 0], x[layer, 1], places[0]) for x in (raw, far)]
        with bounds_check.reaching(raw, far):
            writes.store((raw, raw), places, pages, is_last=layer == 1)
    assert not far.any() and len(later) == 1
    for x in places:
        x.zero_()
    with bounds_check.reaching(raw, far):
        writes.wait()
    kept, stored = raw.flatten(2, 3), far.flatten(2, 3)
    assert stored[:, :, far_slots].equal(kept[:, :, slots])


def dtypes_of(arguments):
    """Those of a launch's tensors, also in tuples."""
    flat = [x for each in arguments for x in (each if isinstance(each, tuple) else (each,))]
    return [x.dtype for x in flat if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [1, 3, 4, 12, 32])
def test_no_batch_needs_a_kernel_that_was_not_compiled(monkeypatch, heads, dtype):
    """Decoding tokens, drafts, ends of prompts and whole ones, few and many, on an H200."""
    monkeypatch.setattr(paged_attend, "chip_of", lambda device: Chip(232448, 132))
    needed = set()

    def launch(kernel, grid, arguments, specialized=(), **constants):
        needed.add((kernel, *dtypes_of(arguments), specialized, *constants.items()))

    for module in (paged_attend, merge_parts):
        monkeypatch.setattr(module, "launch", launch)
    config = CCAConfig.pooling(group_size=16, window_size=1024, sink_size=16, core_mass=True)
    spec = Spec.of(config, halves(), 1.0)
    page = torch.zeros(1, 16, 8, 128, dtype=dtype)
    raw = Pages(page, page, torch.zeros(1, 256, dtype=torch.int32))
    cores = raw._replace(mass=torch.zeros(1, 16, 8))
    q = torch.empty(2200, 8 * heads, 128, dtype=dtype, device="meta")
    compile_for_any_batch(q, raw, cores, spec)
    compiled, needed = needed, set()
    draw = random.Random(0)
    for _ in range(300):
        sequences, most_new = int(2 ** draw.uniform(0, 7)), int(2 ** draw.uniform(0, 11))
        longest = most_new + int(2 ** draw.uniform(0, 17))
        lengths = torch.zeros(sequences, dtype=torch.int32)
        batch = Batch(torch.zeros(sequences + 1, dtype=torch.int32), lengths, most_new, longest)
        attend_pages(q[: most_new + sequences - 1], batch, raw, cores, spec)
    assert len(needed) > 4 and needed <= compiled


def test_compiling_for_any_batch_touches_no_page():
    config = CCAConfig.pooling(group_size=2, window_size=3, sink_size=0)
    cache = Cache(PageLayout.of(config, 4), [9], torch.float32, True)
    before = [x.clone() for x in (cache.raw.k, cache.raw.v, cache.cores.mass)]
    q = torch.full((1, SHARE, DIM), torch.nan)
    compile_for_any_batch(q, *cache.rows([0]), Spec.of(config, halves(), 1.0))
    after = (cache.raw.k, cache.raw.v, cache.cores.mass)
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(before, after))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter takes minutes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes_of_a_real_model(monkeypatch, dtype):
    """Head size 128, four query heads of a KV head: chunks, decoding tokens, drafts, at lengths
    where programs share the entries of a block."""
    monkeypatch.setitem(globals(), "DIM", 128)
    monkeypatch.setitem(globals(), "SHARE", 4)
    config = CCAConfig.pooling(group_size=16, window_size=256, sink_size=16, core_mass=True)
    rotary = Rotary.from_theta(1e4, 128)
    steps = [
        {0: 2048, 1: 5},
        {0: 1024, 1: 700, 2: 1},
        {0: 1, 1: 1, 2: 1},
        {0: 4, 1: 4, 2: 4},
        {0: 1},
    ]
    check(config, rotary, steps, dtype, kv_heads=2, page_size=16)
