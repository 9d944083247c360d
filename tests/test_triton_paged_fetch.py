"""The kernels of fetch over block tables against the reference: on the GPU where there is one, else
in Triton's interpreter."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton")

import triton
import triton.language as tl

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.integrations.vllm.shared_chunks import attend_sharing
from corecontext.ops.fetch.prompt_rule import Reading
from corecontext.ops.fetch.scoring import centre_of, group_keys
from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged import attend_rows as paged_rows
from corecontext.ops.triton.paged.attend_rows import attend_rows, rotations_of
from corecontext.ops.triton.paged.group_slots import (
    PROMPT_TRY,
    STEP_TRY,
    FarPages,
    GroupSlots,
    take_slots,
)
from corecontext.ops.triton.paged.pages import Batch, IndexPages, Pages
from corecontext.ops.triton.paged.pool_pages import PoolPlan, pool_pages
from corecontext.ops.triton.paged.store_tokens import store_tokens
from corecontext.ops.triton.paged.token_rows import clock_of, write_rows
from corecontext.visibility import local_start

pytestmark = pytest.mark.usefixtures("default_device")
WORST = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # of the largest row's norm, in any row
DIM, SHARE, KV_HEADS = 16, 3, 2  # head size, query heads of a KV head
PAGE, CORE_PAGE = 8, 2  # entries
FETCH = {"group_size": 4, "window_size": 9, "sink_size": 4, "fetch_groups": 2}


class Cache:
    """Pages in random places for several sequences; entries that nobody wrote hold NaN."""

    def __init__(self, lengths: list[int], spec: Spec, dtype: torch.dtype):
        generator = torch.Generator("cpu").manual_seed(0)
        device = torch.get_default_device()

        def tables(tokens: int, spare: int) -> tuple[int, torch.Tensor]:
            counts = [-(-length // tokens) for length in lengths]
            order = torch.randperm(sum(counts) + 2, generator=generator, device="cpu").tolist()
            rows = [[order.pop() for _ in range(count)] for count in counts]
            rows = [row + [2**30] * (max(counts) + spare - len(row)) for row in rows]
            rows.append(order[:1] * len(rows[0]))  # of a page that nobody writes
            return sum(counts) + 2, torch.tensor(rows, dtype=torch.int32, device=device)

        def pages(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            memory = torch.full((count, KV_HEADS, size, 2 * DIM), torch.nan, dtype=dtype)
            return memory.transpose(1, 2).chunk(2, -1)

        num_raw, table = tables(PAGE, 0)
        self.raw = Pages(*pages(num_raw, PAGE), table)
        num_cores, table = tables(CORE_PAGE * spec.group_size, 3)
        mass = torch.full((num_cores, CORE_PAGE, KV_HEADS), torch.nan)
        self.cores = Pages(*pages(num_cores, CORE_PAGE), table, mass if spec.core_mass else None)
        self.far = Pages(*pages(num_cores, CORE_PAGE * spec.group_size), table)
        keys, bits = spec.index.num_keys(spec.group_size), spec.index.bits
        shape = (num_cores, CORE_PAGE, KV_HEADS)
        scales = 1 if spec.index.shares_scale else keys
        self.index = IndexPages(
            torch.full((*shape, keys * DIM * bits // 8), 255, dtype=torch.uint8),
            torch.full((*shape, scales), torch.nan, dtype=torch.float16),
            torch.full((num_cores, KV_HEADS, DIM), torch.nan),
            rotations_of(bits, DIM, dtype, mass.device),
        )

    def step(self, rows: list[int]) -> tuple[Pages, Pages]:
        """The pages of some sequences."""
        return tuple(x._replace(table=x.table[rows]) for x in (self.raw, self.cores))

    def slots(self, sequence: int, start: int, end: int, pages: Pages | None = None) -> list[int]:
        pages = pages or self.raw
        table = pages.table[sequence].tolist()
        size = pages.k.shape[1]
        return [table[p // size] * size + p % size for p in range(start, end)]

    def keep_window(self, sequence: int, past: int, spec: Spec) -> None:
        """Forget the raw tokens that have left the window."""
        low = local_start(past, spec.group_size, spec.window_size)
        for slot in self.slots(sequence, spec.sinks, low):
            for x in self.raw[:2]:
                x[slot // PAGE, slot % PAGE] = torch.nan


class Kept:
    """Slots of groups before the window; in host memory, groups that have a slot hold NaN."""

    def __init__(self, cache: Cache, spec: Spec, count: int):
        self.groups = cache.far.k.shape[0], CORE_PAGE
        group = (KV_HEADS, count, spec.group_size, 2 * DIM)
        memory = torch.full(group, torch.nan, dtype=cache.far.k.dtype)
        clock = clock_of(memory.device)
        self.slots = GroupSlots.make(memory, (*self.groups, KV_HEADS), clock)
        self.tables, self.group_size = cache.cores.table.tolist(), spec.group_size
        self.first_group = spec.sinks // spec.group_size
        self.far = [x.unflatten(1, (CORE_PAGE, -1)) for x in cache.far[:2]]  # [P, E, g, Hkv, D]
        self.hidden = [x.clone() for x in self.far]
        self.was_hidden = torch.zeros(*self.groups, KV_HEADS, dtype=torch.bool)
        self.evicted = 0

    def reveal(self) -> None:
        """Show what host memory holds."""
        hidden = self.was_hidden[:, :, None, :, None]
        for far, kept in zip(self.far, self.hidden):
            far.copy_(torch.where(hidden, kept, far))

    def hide(self, ends: dict[int, int]) -> None:
        """Hide the groups of these sequences that have a slot, whose tokens are theirs."""
        has_slot = torch.zeros_like(self.was_hidden)
        for i, end in ends.items():
            for number in range(self.first_group, end // self.group_size):
                place = self.tables[i][number // CORE_PAGE], number % CORE_PAGE
                has_slot[place] = self.slots.table[place] >= 0
        self.evicted += int((self.was_hidden & ~has_slot).sum())
        for page, entry, head in has_slot.nonzero().tolist():
            slot = self.slots.table[page, entry, head]
            assert self.slots.owner[head, slot] == page * CORE_PAGE + entry
            halves = self.slots.tokens[head, slot].chunk(2, -1)
            for far, kept in zip(self.far, halves):
                torch.testing.assert_close(kept, far[page, entry, :, head], rtol=0, atol=0)
        self.hidden = [x.clone() for x in self.far]
        self.was_hidden = has_slot
        for far in self.far:
            far.masked_fill_(has_slot[:, :, None, :, None], torch.nan)


def served(
    config,
    rotary,
    qkv,
    steps,
    dtype,
    prompts=(),
    padding=0,
    reading=None,
    has_far=False,
    num_slots=0,
    reuses=False,
    filling=0,
):
    """Outputs of all sequences, whose new tokens of each step are {sequence: count}; the first
    `prompts` tokens of a sequence see all tokens before them. And the cache.

    With `reading`, each step has tokens of one sequence, which are a prompt's. With `has_far`, raw
    tokens before the window are read from other pages, with `num_slots` through slots. With
    `reuses`, all sequences have the same pages, one after the other, those of core tokens in turn
    forwards and backwards: a sequence's first page is a later one of the other. The first `filling`
    steps only write the cache.
    """
    lengths = [len(q) for q, _, _ in qkv]
    spec = Spec.of(config, rotary, DIM**-0.5)
    cache = Cache(lengths, spec, dtype)
    if reuses:
        for pages in (cache.raw, cache.cores):
            pages.table[:] = pages.table[0].clone()
        whole = lengths[0] // (CORE_PAGE * spec.group_size)
        cache.cores.table[1::2, :whole] = cache.cores.table[0, :whole].flip(0)
    kept = cache.kept = Kept(cache, spec, num_slots) if num_slots else None
    computed = [0] * len(qkv)
    outs = [torch.full_like(q, torch.nan) for q, _, _ in qkv]
    for number, step in enumerate(steps):
        spans = {i: (computed[i], computed[i] + count) for i, count in step.items()}
        q, k, v = (torch.cat([qkv[i][j][a:b] for i, (a, b) in spans.items()]) for j in range(3))
        slots = torch.tensor([s for i, span in spans.items() for s in cache.slots(i, *span)])
        no_tokens = [0] * bool(padding)  # fill up the sequences, too
        counts = torch.tensor([0, *step.values(), *no_tokens])
        ends = torch.tensor([b for _, b in spans.values()] + no_tokens)
        batch = Batch(counts.cumsum(0).int(), ends.int(), max(step.values()), max(lengths))
        raw, cores = cache.step([*step, *(-1 for _ in no_tokens)])
        if kept:
            kept.reveal()
        far = FarPages(cache.far._replace(table=cores.table), kept and kept.slots)
        far = far if has_far else None
        new = (k, v, slots)
        stores_far = has_far and batch.most_new <= spec.group_size
        if has_far:
            places = [cache.slots(i, *span, cache.far) for i, span in spans.items()]
            if not stores_far:
                store_tokens(k, v, torch.tensor([*itertools.chain(*places)]), far.pages)
            for i, (a, _) in spans.items():
                cache.keep_window(i, a, spec)
        tables = (raw.table, cores.table)
        plan = PoolPlan.of(raw, cores, spec, q.shape[1], cache.index, far)
        if padding:
            none = (k * torch.nan, v, slots * 0 - 1)  # a step without places, of first tokens
            begins = batch._replace(lengths=counts.diff().int())
            pool_pages(q, none, begins, tables, plan, stores_far)
        pool_pages(q, new, batch, tables, plan, stores_far)
        if kept:
            others = {} if reuses else dict(enumerate(computed))
            kept.hide({**others, **{i: b for i, (_, b) in spans.items()}})
        if number < filling:
            computed = [spans.get(i, (0, end))[1] for i, end in enumerate(computed)]
            continue
        if reading is not None:
            [(i, (a, b))] = spans.items()
            pages, slots = far or (raw, None)
            given = (spec, reading, outs[i][a:b], slots)
            attend_sharing((q, k, v), a, (pages, cores), *given)
            computed[i] = b
            continue
        full_until = [prompts[i] if i < len(prompts) else 0 for i in spans] + no_tokens
        q = torch.cat([q, q.new_zeros(padding, *q.shape[1:])])
        buffer = torch.full((3, len(q) + 1), 2**30, dtype=torch.int32)
        rows = write_rows(batch, torch.tensor(full_until).int(), len(q), buffer)
        out = torch.full_like(q, torch.nan)
        attend_rows(q, rows, (raw, cores), cache.index, max(lengths), spec, out, far)
        assert out.isfinite().all()
        for new, (i, (a, b)) in zip(out.split([*step.values(), padding]), spans.items()):
            outs[i][a:b] = new
            computed[i] = b
    assert computed == lengths
    return outs, cache


def reference(config, rotary, qkv, prompt=0, share=1):
    """Outputs of one sequence by itself, in float64."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in qkv)
    names = ("group_size", "window_size", "sink_size", "core_position", "core_mass")
    names += ("fetch_groups", "fetch_index")
    options = {name: getattr(config, name) for name in names}
    options |= {"rotary": rotary, "backend": "reference", "fetch_share": share}
    out = cca_attention(q, k, v, **options)
    full = cca_attention(q, k, v, **{**options, "window_size": len(qkv[0]), "fetch_groups": 0})
    out[:, :, :prompt] = full[:, :, :prompt]
    return out[0].transpose(0, 1)


def check(config, steps, dtype=torch.float32, prompts=(), rotary=None, **options):
    """Every output row of every sequence equals the reference's."""
    filling = steps[: options.get("filling", 0)]
    lengths, filled = (
        [sum(step.get(i, 0) for step in some) for i in range(1 + max(map(max, steps)))]
        for some in (steps, filling)
    )
    generator = torch.Generator("cpu").manual_seed(1)
    heads = (SHARE * KV_HEADS, KV_HEADS, KV_HEADS)
    default = torch.get_default_device()
    qkv = [
        [
            torch.randn(n, h, DIM, generator=generator, device="cpu").to(default, dtype)
            for h in heads
        ]
        for n in lengths
    ]
    outs, cache = served(config, rotary, qkv, steps, dtype, prompts, **options)
    reading = options.get("reading") or Reading(0, 1)
    for i, (out, tensors) in enumerate(zip(outs, qkv)):
        prompt = prompts[i] if i < len(prompts) else reading.full_until
        shared = config.replace(fetch_groups=reading.times * config.fetch_groups)
        expected = reference(shared, rotary, tensors, prompt, reading.share)
        rows = (out.double() - expected)[filled[i] :].norm(dim=-1)
        assert rows.max() <= WORST[dtype] * expected.norm(dim=-1).max()
    return qkv, cache


STEPS = [{0: 29, 1: 7}, {1: 11, 0: 1}, {0: 4, 1: 1, 2: 5}]
SHORT = [{0: 29, 1: 3}, {1: 2, 0: 1}, {0: 4, 1: 1}]


@pytest.mark.parametrize(
    ("index", "steps", "filling"),
    [("bits:2", STEPS, 0), ("pairs:2", SHORT, 1), ("bits:4", SHORT, 1)],
    ids=["bits:2", "pairs:2", "bits:4"],
)
def test_each_token_of_a_ragged_batch_chooses(index, steps, filling):
    """Prompts, chunks that begin within a group, decoding tokens, tokens with drafts."""
    config = CCAConfig(**FETCH, fetch_index=index)
    check(config, steps, rotary=Rotary.from_theta(100.0, DIM), filling=filling)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["pairs:2", "bits:4"])
def test_each_token_of_a_long_prompt_chooses_by_other_indexes(index):
    steps = [{0: 41, 1: 7}, {1: 22, 0: 1}, {0: 4, 1: 1, 2: 9}]
    check(CCAConfig(**FETCH, fetch_index=index), steps, rotary=Rotary.from_theta(100.0, DIM))


def test_tokens_of_prompts_see_all_tokens():
    config = CCAConfig(**FETCH, core_position="token", core_mass=False)
    check(config, STEPS, prompts=(29, 18), padding=3)


def test_neighbours_of_a_prompt_share_a_choice():
    """Behind its beginning, which sees all tokens, in chunks that begin at shares."""
    config = CCAConfig(**FETCH)
    steps = [{0: 12}, {0: 18}, {0: 11}]
    rotary = Rotary.from_theta(100.0, DIM)
    check(config, steps, rotary=rotary, reading=Reading(15, 6, 2))


def test_raw_tokens_before_the_window_have_other_pages():
    """As those in host memory: for prompts, and for each token that chooses."""
    check(CCAConfig(**FETCH, core_position="token"), STEPS, prompts=(29,), has_far=True)


def test_groups_that_were_fetched_lately_have_slots():
    """Fewer than a step chooses, and enough for all; host memory holds NaN where they have one."""
    config = CCAConfig(**{**FETCH, "fetch_groups": 3}, core_position="token")
    steps = [{0: 41}, {1: 33}, *[{0: 1, 1: 2}] * 6]
    for count in (4, 12):
        _, cache = check(config, steps, padding=2, has_far=True, num_slots=count, filling=2)
        assert (cache.kept.slots.last_used >= 0).all()
        assert cache.kept.evicted > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [4, 12])
def test_tokens_of_prompts_that_choose_have_slots(num_slots):
    """As above, from the first token on."""
    config = CCAConfig(**{**FETCH, "fetch_groups": 3}, core_position="token")
    steps = [{0: 41}, {1: 33}, *[{0: 1, 1: 2}] * 6]
    _, cache = check(config, steps, padding=2, has_far=True, num_slots=num_slots)
    assert cache.kept.evicted > 0


def test_a_page_of_another_sequence_has_no_slots_of_the_one_before():
    config = CCAConfig(**FETCH, core_position="token")
    steps = [{0: 28}, {0: 1}, {0: 1}, {0: 2}, {1: 28}, {1: 4}]
    check(config, steps, has_far=True, num_slots=4, reuses=True, filling=1)


@pytest.mark.parametrize("num_slots", [0, 4, 20])
def test_neighbours_read_raw_tokens_before_the_window_from_other_pages(num_slots):
    """Or from slots, where the pooling of a chunk kept its groups: of both sequences in turn, which
    have the same pages."""
    config = CCAConfig(**FETCH, core_position="token")
    options = {"has_far": True, "num_slots": num_slots, "reuses": True}
    steps = [{0: 12}, {0: 18}, {0: 11}, {1: 18}, {1: 1}, {1: 2}, {1: 12}]
    _, cache = check(config, steps, reading=Reading(15, 6), **options)
    if num_slots:
        assert (cache.kept.slots.owner >= 0).sum() == KV_HEADS * min(num_slots, 9 + 7)


def test_shares_of_the_entries_are_merged(monkeypatch):
    monkeypatch.setattr(paged_rows, "parts_of_rows", lambda *sizes: 3)
    config = CCAConfig(**{**FETCH, "sink_size": 0}, core_position="token")
    spec = Spec.of(config, None, DIM**-0.5)
    q = torch.zeros(5, SHARE * KV_HEADS, DIM, dtype=torch.bfloat16)
    acc, lse = paged_rows.Work.of(q, KV_HEADS, 70, spec).partial
    assert [*acc.shape] == [5 * KV_HEADS, 3, SHARE, DIM] and {acc.dtype, lse.dtype} == {
        torch.float32
    }
    check(config, [{0: 68}, {0: 4}], torch.bfloat16, filling=1)


def test_an_index_is_written_as_the_reference_encodes_it():
    config = CCAConfig(**{**FETCH, "window_size": 13}, core_position="token")
    spec = Spec.of(config, None, DIM**-0.5)
    assert spec.num_centred == 12
    [(_, k, _)], cache = check(config, [{0: 30}, {0: 1}, {0: 6}, {0: 3}], filling=1)
    keys = k.transpose(0, 1).double()
    count = spec.index.num_indexed(40 - spec.sinks, spec.group_size, spec.window_size)
    assert count == 7
    centre = centre_of(keys, spec)
    expected = spec.index.encode(group_keys(keys, spec, count), centre)
    first = spec.sinks // spec.group_size
    for stored, wanted in zip(cache.index[:2], expected):
        pages = cache.cores.table[0].long().clamp(max=len(stored) - 1)
        entries = stored[pages].flatten(0, 1)[first : first + count]  # [M, Hkv, numbers]
        wanted = wanted.flatten(2).transpose(0, 1)
        torch.testing.assert_close(entries, wanted, rtol=1e-3, atol=0)


def test_programs_that_share_the_work_of_a_group_keep_it_in_a_slot():
    """One pools, one keeps the tokens in a slot, one writes the index."""
    config = CCAConfig(**FETCH, core_position="token")
    cache = check(config, SHORT, has_far=True, num_slots=20)[1]
    assert (cache.kept.slots.table >= 0).any()


def test_no_program_waits_for_what_another_one_stores():
    """With one page for all raw tokens of a prompt, groups are pooled, indexed and kept all the
    same: new tokens are read where the step has them."""
    config = CCAConfig(**FETCH, core_position="token")
    spec = Spec.of(config, None, DIM**-0.5)
    generator = torch.Generator("cpu").manual_seed(1)
    heads = (SHARE * KV_HEADS, KV_HEADS, KV_HEADS)
    shapes = [(31, count, DIM) for count in heads]
    q, k, v = (torch.randn(shape, generator=generator, device="cpu") for shape in shapes)
    q, k, v = (x.to(torch.get_default_device()) for x in (q, k, v))
    batch = Batch(torch.tensor([0, 31]).int(), torch.tensor([31]).int(), 31, 31)
    written = []
    for is_one in (False, True):
        cache = Cache([31], spec, q.dtype)
        raw, cores = cache.step([0])
        slots = torch.tensor(cache.slots(0, 0, 31))
        if is_one:
            raw = raw._replace(table=torch.zeros_like(raw.table))
        kept = Kept(cache, spec, 20).slots
        far = FarPages(cache.far._replace(table=cores.table), kept)
        plan = PoolPlan.of(raw, cores, spec, q.shape[1], cache.index, far)
        pool_pages(q, (k, v, slots), batch, (raw.table, cores.table), plan)
        written.append((*cores[:2], cores.mass, *cache.index[:3]))
        groups = torch.cat((k, v), -1)[:28].unflatten(0, (7, -1))  # [groups, g, Hkv, 2 D]
        count = 0
        for number, head in itertools.product(range(1, 7), range(KV_HEADS)):
            slot = kept.table[cores.table[0, number // CORE_PAGE], number % CORE_PAGE, head]
            if slot >= 0:
                count += 1
                assert torch.equal(kept.tokens[head, slot], groups[number, :, head])
        assert count
    for one, other in zip(*written):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@triton.jit
def take_slots_kernel(slots, core_ptr, taken_ptr, num_slots, TRY: tl.constexpr, K: tl.constexpr):
    number = tl.arange(0, K)
    core = tl.load(core_ptr + number)
    taken = take_slots(slots, core, number >= 0, (0, 1, num_slots), TRY)
    tl.store(taken_ptr + number, taken)


@pytest.mark.parametrize(
    ("first_try", "age", "tries"),
    # None: all tries fail.
    [
        (PROMPT_TRY, 9, 1),
        (PROMPT_TRY, 8, 2),
        (PROMPT_TRY, 1, 4),
        (PROMPT_TRY, 0, None),
        (STEP_TRY, 129, 1),
        (STEP_TRY, 128, 2),
        (STEP_TRY, 9, 5),
        (STEP_TRY, 1, 8),
    ],
)
def test_groups_of_a_prompt_take_slots_that_prompts_of_the_last_steps_filled(first_try, age, tries):
    """All of 16 slots were read `age` steps ago; each try passes over as many as are missing."""
    clock = clock_of(torch.empty(0).device).fill_(1000)
    memory = torch.zeros(1, 16, 4, 8)
    slots = GroupSlots.make(memory, (64, 1, 1), clock)
    slots.last_used.fill_(1000 - age)
    slots.owner.copy_(torch.arange(16))
    slots.table[:16, 0, 0] = torch.arange(16)
    core = torch.arange(40, 56, dtype=torch.int32)
    taken = torch.empty_like(core)
    take_slots_kernel[(1,)](tuple(slots[1:]), core, taken, 16, first_try.value, 16)
    if tries is None:
        assert (taken == -1).all()
        assert (slots.table[:16] >= 0).all()
    else:
        assert sorted(taken.tolist()) == list(range(16))
        assert (slots.table[:16] == -1).all()
        assert slots.hands.tolist() == [16 * tries]
        assert (slots.last_used == 1000).all()
    torch.testing.assert_close(slots.table[40:56, 0, 0], taken)
