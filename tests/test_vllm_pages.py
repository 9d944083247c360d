"""The pages of vLLM's block tables: whatever the schedule, queries read the entries that the rule
of visibility allows, and find there what was written."""

import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from corecontext import CCAConfig
from corecontext.integrations.vllm import plugin
from corecontext.integrations.vllm.page_layout import SLOTS_SHARE, PageLayout
from corecontext.visibility import num_visible_cores, sees_token


class Store:
    """Pages that are reused at once, the last freed first, with the number of their users."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.contents: list[dict[int, object]] = []
        self.users: Counter[int] = Counter()

    def take(self) -> int:
        """Return a page with whatever its last user wrote."""
        if not self.free:
            self.free.append(len(self.contents))
            self.contents.append({})
        page = self.free.pop()
        self.users[page] = 1
        return page

    def share(self, page: int) -> int:
        self.users[page] += 1
        return page

    def drop(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            self.free.append(page)

    def write(self, page: int, entry: int, content: object) -> None:
        assert self.users[page] == 1, "a shared page is written"
        self.contents[page][entry] = content


class Request:
    """A request that appends tokens in chunks; tokens are (name, position)."""

    def __init__(self, store: Store, layout: PageLayout, name: str) -> None:
        self.store = store
        self.layout = layout
        self.name = name
        self.computed = 0
        self.window: dict[int, int] = {}
        self.cores: dict[int, int] = {}
        self.begun: dict[int, tuple[dict[int, int], dict[int, int]]] = {}  # shared beginnings

    def release(self) -> None:
        """Drop all pages, as a preempted request does; beginnings that others may share stay."""
        for page in (*self.window.values(), *self.cores.values()):
            self.store.drop(page)
        self.window, self.cores, self.computed = {}, {}, 0

    def resume(self, length: int) -> None:
        """Begin again with the pages of a shared beginning."""
        window, cores = self.begun[length]
        self.window = {number: self.store.share(page) for number, page in window.items()}
        self.cores = {number: self.store.share(page) for number, page in cores.items()}
        self.computed = length

    def keep_beginning(self, length: int) -> None:
        """Share the pages that a request resuming at `length` needs: they are full by now."""
        layout = self.layout
        if length in self.begun:
            return
        window = {number: self.window[number] for number in layout.window_pages(length, length)}
        cores = {number: self.cores[number] for number in layout.core_pages(length)}
        for page in (*window.values(), *cores.values()):
            self.store.share(page)
        self.begun[length] = (window, cores)

    def read(self, table: dict[int, int], number: int) -> object:
        size = self.layout.page_size
        if table is self.cores:
            size = self.layout.core_page_tokens // self.layout.group_size
        page, entry = divmod(number, size)
        return self.store.contents[table[page]].get(entry)

    def step(self, count: int, accepted: int) -> None:
        """Append `count` tokens, of which the first `accepted` stay."""
        layout = self.layout
        start, end = self.computed, self.computed + count
        wanted = layout.window_pages(start, end)
        for number in set(self.window) - set(wanted):
            self.store.drop(self.window.pop(number))
        for table, numbers in ((self.window, wanted), (self.cores, layout.core_pages(end))):
            for number in numbers:
                if number not in table:
                    table[number] = self.store.take()
        assert len(self.window) <= layout.most_window_pages(count, end)
        tokens = {p: (self.name, p, p < start + accepted) for p in range(start, end)}
        for position, token in tokens.items():
            page, entry = divmod(position, layout.page_size)
            self.store.write(self.window[page], entry, token)
        for group in layout.completed_groups(start, end):
            first = group * layout.group_size
            members = [self.read(self.window, first + o) for o in range(layout.group_size)]
            page, entry = divmod(group, layout.core_page_tokens // layout.group_size)
            self.store.write(self.cores[page], entry, members)
        for position in range(start, start + accepted):
            self.check(position)
        self.computed += accepted
        for length in range(layout.core_page_tokens, self.computed + 1, layout.core_page_tokens):
            if length > start:
                self.keep_beginning(length)

    def check(self, position: int) -> None:
        """The entries read are those that the rule allows, and hold this request's tokens."""
        layout = self.layout
        g, s, n = layout.group_size, layout.window_size, layout.sinks
        sinks, cores, raw = layout.reads(position)
        groups = range(n // g, max(n // g, num_visible_cores(position, g, s)))
        assert cores == groups
        keys = torch.arange(position + 1)
        allowed = sees_token(keys, torch.tensor(position), g, s, n).nonzero()[:, 0].tolist()
        assert [*sinks, *raw] == allowed
        for token in allowed:
            assert self.read(self.window, token) == (self.name, token, True)
        for group in cores:
            members = [(self.name, group * g + o, True) for o in range(g)]
            assert self.read(self.cores, group) == members


LAYOUTS = [
    PageLayout(group_size=4, window_size=6, sinks=0, page_size=4),
    PageLayout(group_size=4, window_size=6, sinks=4, page_size=4),
    PageLayout(group_size=3, window_size=5, sinks=6, page_size=4),
    PageLayout(group_size=2, window_size=1, sinks=10, page_size=3),
    PageLayout(group_size=5, window_size=1, sinks=5, page_size=2),
    PageLayout(group_size=1, window_size=3, sinks=2, page_size=4),
    PageLayout(group_size=2, window_size=5, sinks=4, page_size=4, core_entries=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_schedule_reads_what_the_rule_allows(layout):
    for seed in range(6):
        draw = random.Random(seed)
        store = Store()
        requests = [Request(store, layout, name) for name in "abc"]
        for _ in range(60):
            request = draw.choice(requests)
            happens = draw.random()
            if happens < 0.06:
                request.release()
                if request.begun and draw.random() < 0.8:
                    request.resume(draw.choice(list(request.begun)))
            elif happens < 0.5:  # decoding, with drafts of which some are rejected
                count = draw.randint(1, 4)
                request.step(count, draw.randint(1, count))
            else:
                request.step(*[draw.randint(1, 17)] * 2)
        for request in requests:
            request.release()


def test_every_position_is_checked_against_the_rule_alone():
    for layout in LAYOUTS:
        request = Request(Store(), layout, "a")
        for _ in range(50):
            request.step(1, 1)


def test_layout_of_settings():
    layout = PageLayout.of(CCAConfig.pooling(group_size=6, window_size=10, sink_size=7), 8)
    assert (layout.sinks, layout.sink_pages, layout.core_page_tokens) == (12, 2, 48)
    assert layout.window_tokens == 15


def test_first_core_page_leaves_the_entries_of_first_tokens_empty():
    layout = PageLayout(group_size=4, window_size=6, sinks=8, page_size=4)
    assert layout.completed_groups(0, 17) == range(2, 4)
    assert layout.completed_groups(0, 7) == range(2, 2)
    assert layout.completed_groups(17, 19) == range(4, 4)


def test_admission_counts_the_pages_of_the_worst_step():
    for layout in LAYOUTS:
        for computed in range(40):
            for count in range(1, 20):
                pages = layout.window_pages(computed, computed + count)
                assert len(pages) <= layout.most_window_pages(count, computed + count)
                assert len(pages) <= layout.most_window_pages(count, 100)


@pytest.mark.parametrize("length, pages", [(300, 400), (70, 90), (20, 64)])
def test_as_many_requests_as_the_cache_is_said_to_hold_have_their_pages(length, pages):
    layout = PageLayout(group_size=4, window_size=20, sinks=4, page_size=8)
    count = layout.cache_tokens(pages, length, 50) // length
    cores = len(layout.core_pages(length))
    steps = [len(layout.window_pages(n - 1, n)) for n in range(1, length + 1)]
    chunks = [len(layout.window_pages(n, min(length, n + 50))) for n in range(max(1, length - 50))]
    needed = (count - 1) * (max(steps) + cores) + max(chunks) + cores
    assert 0 < needed <= pages
    assert needed + 2 * (max(steps) + cores + 1) > pages  # and about no more


def test_a_cache_that_holds_no_step_holds_no_tokens():
    layout = PageLayout(group_size=4, window_size=20, sinks=4, page_size=8)
    assert layout.cache_tokens(2, 300, 200) == 0


@pytest.mark.parametrize("version", ["0.22.1", "0.25.1", "0.28.1rc2.dev7+g1a2b3c", "0.2"])
def test_an_older_release_of_vllm_gets_no_plug_in(monkeypatch, version):
    """Nothing of it is imported."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    message = (
        f"not available in vLLM {re.escape(version)}: this version of corecontext takes "
        f"{plugin.RELEASES}, and commit 7a5d12b0 of corecontext takes vLLM 0.23 to 0.25$"
    )
    with pytest.warns(UserWarning, match=message):
        plugin.register()


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing of vLLM nor of its plug-in is loaded, whatever tests ran before."""
    for name in [*sys.modules]:
        if name.startswith(("vllm.", "corecontext.integrations.vllm.")):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("version", ["0.34.0", "1.0", "dev"])
def test_a_newer_release_of_vllm_with_other_interfaces_gets_no_plug_in(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert not plugin.is_tested(version)
    message = (
        f"not available in vLLM {version}: .* {plugin.RELEASES}, and this newer release has other"
    )
    with pytest.warns(UserWarning, match=message):
        plugin.register()


@pytest.mark.usefixtures("unloaded")
def test_a_tested_release_of_vllm_that_lacks_an_interface_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))
    with pytest.raises(ImportError, match="vllm"):
        plugin.register()


def test_slots_take_the_share_of_the_memory_that_the_page_says():
    text = " ".join(
        (Path(__file__).parents[1] / "docs/vllm.md").read_text(encoding="utf-8").split()
    )
    assert "up to a tenth of the memory that vLLM may use" in text and SLOTS_SHARE == 1 / 10


def test_the_releases_of_vllm_are_those_of_the_extra():
    oldest, newest = (".".join(map(str, release)) for release in (plugin.OLDEST, plugin.NEWEST))
    assert f"vLLM {oldest} to {newest}" == plugin.RELEASES
    major, minor = plugin.NEWEST
    extra = f'vllm = ["vllm>={oldest},<{major}.{minor + 1}"]'
    assert extra in Path(__file__).parent.with_name("pyproject.toml").read_text().splitlines()
