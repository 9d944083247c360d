"""The caches of a layer in vLLM, under its own manager of pages: whatever is scheduled, queries
find in the block tables the entries that the rule of visibility allows."""

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="the plug-in to vLLM needs vllm")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm_planning import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    planning_config,
)

from corecontext.integrations.vllm.cache_managers import WindowManager, register_cache_specs
from corecontext.integrations.vllm.cache_specs import CoreSpec, RawSpec, TokenSpec, WindowSpec
from corecontext.integrations.vllm.page_layout import PageLayout
from corecontext.integrations.vllm.raw_heads import grouped_caches

LONGEST = 120
SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def specs_of(
    layout: PageLayout, drafts: int = 0, store: str | None = None
) -> tuple[WindowSpec | TokenSpec, CoreSpec]:
    """The first cache of a layer and that of core tokens; with a store of raw tokens, of fetch."""
    if store is None:
        return WindowSpec.of(layout, drafts, **SHAPE), CoreSpec.of(layout, **SHAPE)
    tokens = TokenSpec(block_size=layout.page_size, **SHAPE)
    padded = {**SHAPE, "page_size_padded": tokens.page_size_bytes}
    cores = CoreSpec.of(layout, is_complete_later=store == "host", **padded)
    return (tokens if store == "device" else WindowSpec.of(layout, drafts, **SHAPE)), cores


class Server:
    """vLLM's manager of pages, with the contents that kernels would write in them.

    With `raw_tokens` there is a third cache: of heads that keep every token, so many on a page.
    With fetch the `store` has all raw tokens: "device", in pages in place of the window's, or
    "host", in a place of each page of core tokens, which has them at the end of a step.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        drafts: int,
        raw_tokens: int = 0,
        store: str | None = None,
    ) -> None:
        register_cache_specs()
        init_none_hash(sha256)
        self.layout = layout
        self.raw_tokens = raw_tokens
        self.store = store
        self.entries = (layout.page_size, layout.core_entries or layout.page_size, raw_tokens)
        specs = list(specs_of(layout, drafts, store))
        if raw_tokens:
            specs.append(RawSpec(block_size=raw_tokens, **{**SHAPE, "num_kv_heads": 1}))
        sizes = [spec.block_size for spec in specs]
        self.hasher = get_request_block_hasher(math.gcd(*sizes), sha256)
        groups = [KVCacheGroupSpec([f"layer_{i}"], spec) for i, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_pages, [], groups),
            LONGEST,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
            max_in_flight_tokens=24,
        )
        self.pages: dict[int, dict[int, object]] = {}
        self.places: dict[int, dict[int, object]] = {}
        """Raw tokens in host memory, by the page of core tokens."""
        self.sent: list[tuple[int, int, object]] = []
        """Raw tokens that are there at the end of the step."""
        self.in_step: set[str] = set()
        self.hits = 0

    def end_step(self) -> None:
        """Begin the next step: what this one sent to host memory is there."""
        for page, entry, content in self.sent:
            self.places.setdefault(page, {})[entry] = content
        self.sent.clear()
        self.in_step.clear()
        self.manager.new_step_starts()

    def free(self, request: Request) -> None:
        """Free the pages of a request that is in no running step."""
        if request.request_id in self.in_step:
            self.end_step()
        self.manager.free(request)

    def request(self, name: str, tokens: list[int]) -> Request:
        return Request(
            name, tokens, SamplingParams(max_tokens=LONGEST), None, block_hasher=self.hasher
        )

    def step(self, request: Request, count: int, accepted: int) -> bool:
        """Compute `count` tokens, of which the first `accepted` stay; False without pages. A
        request is once in a step."""
        if request.request_id in self.in_step:
            self.end_step()
        options = {}
        if not request.num_computed_tokens:
            shared, length = self.manager.get_computed_blocks(request)[:2]
            count = min(count, request.num_tokens - length)
            accepted = count
            options = {"num_new_computed_tokens": length, "new_computed_blocks": shared}
        start = request.num_computed_tokens + options.get("num_new_computed_tokens", 0)
        if self.manager.allocate_slots(request, count, **options) is None:
            return False
        self.in_step.add(request.request_id)
        self.hits += start - request.num_computed_tokens
        self.compute(request, start, start + count, accepted)
        request.num_computed_tokens = start + accepted
        return True

    def at(self, kind: int, request: Request, number: int) -> tuple[int, int]:
        """The page and the entry of a token (kind 0, and 2 of heads that keep every token) or a
        core token (kind 1)."""
        table = self.manager.get_block_ids(request.request_id)[kind]
        return table[number // self.entries[kind]], number % self.entries[kind]

    def place(self, request: Request, position: int) -> tuple[int, int]:
        """The page of core tokens and the entry of its place in host memory of a raw token."""
        size = self.layout.core_page_tokens
        return self.manager.get_block_ids(request.request_id)[1][position // size], position % size

    def write(self, kind: int, request: Request, number: int, content: object) -> None:
        page, entry = self.at(kind, request, number)
        block = self.manager.block_pool.blocks[page]
        assert not block.is_null
        held = self.pages.setdefault(page, {})
        assert block.ref_cnt == 1, "a shared page is written"
        held[entry] = content

    def read(self, kind: int, request: Request, number: int) -> object:
        page, entry = self.at(kind, request, number)
        return self.pages[page][entry]

    def compute(self, request: Request, start: int, end: int, accepted: int) -> None:
        """Write new tokens, then the core tokens of their groups, then read for each query. A
        token's entry depends on the tokens up to it."""
        layout = self.layout
        g = layout.group_size
        tokens = list(request.all_token_ids)

        def entry(position: int) -> object:
            return tuple(tokens[: position + 1]) if position < start + accepted else object()

        for position in range(start, end):
            self.write(0, request, position, entry(position))
            if self.raw_tokens:
                self.write(2, request, position, entry(position))
            if self.store == "host":
                self.sent.append((*self.place(request, position), entry(position)))
        for group in layout.completed_groups(start, end):
            members = tuple(self.read(0, request, group * g + o) for o in range(g))
            self.write(1, request, group, members)
        for position in range(start, start + accepted):
            sinks, cores, raw = layout.reads(position)
            for number in (*sinks, *raw):
                assert self.read(0, request, number) == entry(number)
            for group in cores:
                members = tuple(entry(group * g + o) for o in range(g))
                assert self.read(1, request, group) == members
        # With fetch a query may choose any token before it.
        for position in range(start + accepted if self.store == "device" else 0):
            assert self.read(0, request, position) == entry(position)
        for position in range(start if self.store == "host" else 0):
            page, place = self.place(request, position)
            assert self.places[page][place] == entry(position)
        if self.raw_tokens:
            for position in range(start + accepted):
                assert self.read(2, request, position) == entry(position)


LAYOUTS = [
    PageLayout(group_size=2, window_size=5, sinks=0, page_size=4),
    PageLayout(group_size=2, window_size=5, sinks=6, page_size=4),
    PageLayout(group_size=3, window_size=9, sinks=3, page_size=2),
    PageLayout(group_size=4, window_size=1, sinks=4, page_size=4),
]


FETCH_LAYOUTS = [
    PageLayout(group_size=2, window_size=5, sinks=2, page_size=4, core_entries=2),
    PageLayout(group_size=3, window_size=9, sinks=6, page_size=4, core_entries=1),
    PageLayout(group_size=4, window_size=4, sinks=4, page_size=8, core_entries=4),
]


@pytest.mark.parametrize("drafts, raw_tokens", [(0, 0), (3, 0), (0, 8), (3, 12)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_schedule_reads_what_the_rule_allows(layout, drafts, raw_tokens):
    check_any_schedule(lambda pages: Server(layout, pages, drafts, raw_tokens), drafts)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("layout", FETCH_LAYOUTS, ids=str)
def test_any_schedule_reads_all_tokens_with_fetch(layout, store, drafts):
    check_any_schedule(lambda pages: Server(layout, pages, drafts, store=store), drafts)


def check_any_schedule(make_server, drafts: int) -> None:
    """Run requests in an order of chance by a server with so many pages, and check what they
    read."""
    draw = random.Random(7)
    hits = preempted = 0
    for num_pages in (30, 45):
        server = make_server(num_pages)
        beginnings = [[draw.randrange(99) for _ in range(64)] for _ in range(2)]
        running: dict[str, Request] = {}
        for number in range(250):
            if len(running) < 4:
                begun = draw.choice(beginnings)[: draw.randint(1, 64)]
                tokens = [*begun, *(draw.randrange(99) for _ in range(draw.randint(1, 9)))]
                running[str(number)] = server.request(str(number), tokens)
            request = draw.choice(list(running.values()))
            left = request.num_tokens - request.num_computed_tokens
            count = accepted = min(left, draw.randint(1, 24))
            if count == left and request.num_computed_tokens:
                count += draw.randint(0, drafts)
                # Of the drafts some are accepted: tokens of the request from now on.
                accepted = draw.randint(left, count)
                request.append_output_token_ids([draw.randrange(99)] * (accepted - left))
            if not server.step(request, count, accepted):
                victim = draw.choice(list(running.values()))
                server.free(victim)
                victim.num_computed_tokens = 0
                preempted += 1
            elif request.num_tokens > LONGEST - 12 or draw.random() < 0.05:
                server.free(running.pop(request.request_id))
            elif request.num_tokens == request.num_computed_tokens:
                request.append_output_token_ids([draw.randrange(99)])
        for request in running.values():
            server.free(request)
        assert server.manager.block_pool.get_num_free_blocks() == num_pages - 1
        hits += server.hits
    assert hits and preempted


def test_a_window_page_and_a_core_page_have_the_same_bytes():
    window, core = specs_of(PageLayout(group_size=16, window_size=1024, sinks=16, page_size=16))
    assert window.page_size_bytes == core.page_size_bytes == 16 * 2 * 2 * 8 * 4
    assert (core.block_size, core.num_states) == (256, 16)


def test_vllm_makes_one_group_of_each_kind():
    register_cache_specs()
    window, core = specs_of(PageLayout(group_size=4, window_size=20, sinks=4, page_size=8))
    specs = {}
    for layer in range(3):
        specs[f"model.layers.{layer}.self_attn.attn"] = window
        specs[f"model.layers.{layer}.self_attn.attn.cores"] = core
    groups = get_kv_cache_groups(planning_config(), specs)
    assert [type(group.kv_cache_spec) for group in groups] == [WindowSpec, CoreSpec]
    assert [len(group.layer_names) for group in groups] == [3, 3]
    assert groups[1].kv_cache_spec == core


@pytest.mark.parametrize("layers, caches", [(4, 2), (4, 1), (2, 4), (4, 5), (3, 7)])
def test_vllm_groups_caches_of_raw_heads_as_their_plan_says(layers, caches):
    register_cache_specs()
    window, core = specs_of(PageLayout(group_size=4, window_size=20, sinks=4, page_size=8))
    raw = RawSpec(block_size=16, **{**SHAPE, "num_kv_heads": 1})
    specs = {f"layer_{number}": window for number in range(layers)}
    specs |= {f"layer_{number}.cores": core for number in range(layers)}
    specs |= {f"raw_{number}": raw for number in range(caches)}
    config = planning_config()
    groups = get_kv_cache_groups(config, specs)
    size, counts = grouped_caches([layers, caches])
    kinds = [type(group.kv_cache_spec) for group in groups]
    assert [kinds.count(kind) for kind in (WindowSpec, CoreSpec, RawSpec)] == [counts[0], *counts]
    assert max(len(group.layer_names) for group in groups) == size
    memory = 10 * size * window.page_size_bytes
    for free, pages in ((memory, 10), (memory - 1, 9)):
        assert get_kv_cache_config_from_groups(config, groups, free).num_blocks == pages


def test_a_long_request_keeps_the_window_and_few_core_pages():
    layout = PageLayout(group_size=4, window_size=8, sinks=4, page_size=4)
    server = Server(layout, 60, 0)
    request = server.request("a", list(range(100)))
    while request.num_computed_tokens < 100:
        assert server.step(request, 5, 5)
    server.manager.remove_skipped_blocks("a", 100)
    window, cores = server.manager.get_block_ids("a")
    kept = [number for number, page in enumerate(window) if page]
    assert kept == layout.window_pages(100, 100)
    assert len(cores) == 7  # 25 core tokens


def test_a_beginning_whose_first_page_is_lost_is_not_shared(monkeypatch):
    window, _ = specs_of(PageLayout(group_size=4, window_size=8, sinks=4, page_size=4))
    found = classmethod(lambda *given, **options: (([None, None, "last"],), 12))
    monkeypatch.setattr(SlidingWindowManager, "find_longest_cache_hit", found)
    for first, shared in (("first", ((["first", None, "last"],), 12)), (None, (([],), 0))):
        pool = SimpleNamespace(hash_block_size=4, get_cached_block=lambda *given: first and [first])
        given = ([b"a", b"b", b"c"], 12, [0], pool, window)
        assert WindowManager.find_longest_cache_hit(*given) == shared


@pytest.mark.parametrize("later", [False, True])
def test_a_request_waits_for_pages_that_are_complete_at_the_end_of_a_step(monkeypatch, later):
    """With raw tokens in host memory a request shares what earlier steps wrote, no more."""
    of = CoreSpec.of
    monkeypatch.setattr(CoreSpec, "of", partial(of, is_complete_later=later))
    server = Server(PageLayout(group_size=2, window_size=5, sinks=2, page_size=4), 60, 0)
    first, second = (server.request(name, [*range(40), ord(name)]) for name in "ab")
    server.manager.new_step_starts()
    assert server.step(first, 24, 24)
    assert server.step(second, 9, 9) != later
    assert server.hits == (0 if later else 24)
    assert server.step(server.request("c", [99, 98]), 2, 2)
    server.manager.new_step_starts()
    assert server.step(first, 16, 16)
    assert server.step(server.request("d", [*range(24), 5]), 1, 1)
    assert server.hits == (24 if later else 48)


def test_a_decoding_step_within_its_pages_asks_nothing_of_vllm(monkeypatch):
    """Hundreds of sequences decode in a step; of sixteen steps one begins a page, one drops one."""
    layout = PageLayout(group_size=2, window_size=20, sinks=2, page_size=16)
    server = Server(layout, 60, 0)
    request = server.request("a", list(range(60)))
    assert server.step(request, 59, 59) and server.step(request, 1, 1)
    called = []

    def spy(name):
        inner = getattr(SlidingWindowManager, name)

        def call(self, *args, **kwargs):
            called.append(name)
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(SlidingWindowManager, name, call)

    spy("remove_skipped_blocks")
    spy("get_num_blocks_to_allocate")
    for _ in range(32):
        request.append_output_token_ids([1])
        assert server.step(request, 1, 1)
    assert sorted(called) == ["get_num_blocks_to_allocate"] * 2 + ["remove_skipped_blocks"] * 2
