"""Print which kernels the steps of a server need, and which of them its start has not compiled:
`python tests/kernels_of_prompts.py`, one JSON line for each server.

Kernels are those that Triton would compile for an NVIDIA chip, by its own keys; nothing is compiled
and none runs. Steps are those of vLLM's scheduler: some sequences decode, and chunks of prompts
fill up the tokens of a step.
"""

import json
import os
import random
import sys
from collections import Counter
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # read once, by the import of triton

import torch
import triton
from triton.backends.compiler import GPUTarget

from corecontext import CCAConfig, Rotary
from corecontext.integrations.vllm.fetch_pages import index_pages_of
from corecontext.integrations.vllm.page_layout import core_entries
from corecontext.integrations.vllm.shared_chunks import (
    attend_longest,
    attend_sharing,
    compile_for_any_length,
)
from corecontext.ops.fetch.prompt_rule import reading_of
from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged import attend_rows as paged_rows
from corecontext.ops.triton.paged.attend_pages import (
    attend_pages,
    compile_for_any_batch,
    compile_merges,
)
from corecontext.ops.triton.paged.batch_parts import Kind, attend_parts, parts_of
from corecontext.ops.triton.paged.chunk import attend_longest_chunk
from corecontext.ops.triton.paged.copy_tokens import copy_tokens
from corecontext.ops.triton.paged.first_prompt import compile_for_any_prompt
from corecontext.ops.triton.paged.group_slots import FarPages, GroupSlots
from corecontext.ops.triton.paged.pages import Batch, Pages
from corecontext.ops.triton.paged.pool_pages import PoolPlan, pool_pages
from corecontext.ops.triton.paged.store_tokens import store_tokens
from corecontext.ops.triton.paged.token_rows import clock_of, write_rows
from corecontext.ops.triton.tiles import Chip

HEADS, KV_HEADS, DIM, PAGE, TYPE = 6, 2, 64, 16, torch.bfloat16
MOST_NEW, MOST_REQUESTS = 8192, 256
WHOLE = 8192
"""Prompts of at most so many tokens are whole ones of FlashAttention's, with fetch."""


class Driver:
    """Stand in for a GPU."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def stand_in(capability: int) -> set[tuple[str, str]]:
    """Make PyTorch's CPU pass for a chip, and return the set that gets the kernels needed."""
    needed = set()

    def note(key: str, fn: Any, **others: Any) -> bool:
        needed.add((fn.name.rpartition(".")[2], key))
        return True  # compile nothing

    triton.runtime.driver.set_active(Driver(capability))
    triton.knobs.runtime.jit_cache_hook = note
    torch.cuda.current_device = lambda: 0
    chip = Chip((227 if capability == 90 else 163) * 1024, 132)
    answers = {
        "nvidia_capability": lambda device: divmod(capability, 10),
        "chip_of": lambda device: chip,
        "num_programs": lambda device: chip.multiprocessors,
    }
    for name, module in list(sys.modules.items()):
        for function in answers.keys() & vars(module).keys() if "corecontext" in name else ():
            setattr(module, function, answers[function])
    return needed


class Server(NamedTuple):
    """Hold settings and pages of one layer."""

    config: CCAConfig
    spec: Spec
    longest: int
    raw: Pages
    cores: Pages
    index: Any = None
    far: FarPages | None = None

    @classmethod
    def of(cls, config: CCAConfig, longest: int, slots: int = 0) -> "Server":
        """Make the pages as vLLM does, three of each kind, which all sequences share."""
        spec = Spec.of(config, Rotary.from_theta(1e4, DIM), DIM**-0.5)
        entries, mass_bytes = PAGE, 4 * PAGE * KV_HEADS * config.core_mass
        if config.fetch_groups:
            entries, mass_bytes = core_entries(config, PAGE, DIM, TYPE.itemsize), 0
        numbers = PAGE * KV_HEADS * 2 * DIM + mass_bytes // TYPE.itemsize

        def pages(size: int, tokens: int) -> tuple[torch.Tensor, Pages]:
            strides = (max(numbers, KV_HEADS * size * 2 * DIM), size * 2 * DIM, 2 * DIM, 1)
            memory = torch.zeros(3 * strides[0], dtype=TYPE)
            cache = memory.as_strided((3, KV_HEADS, size, 2 * DIM), strides)
            table = torch.zeros(MOST_REQUESTS, -(-longest // tokens), dtype=torch.int32)
            return cache, Pages(*cache.transpose(1, 2).chunk(2, -1), table)

        raw = pages(PAGE, PAGE)[1]
        cache, cores = pages(entries, entries * spec.group_size)
        if config.core_mass:
            stride = numbers * TYPE.itemsize // 4
            mass = torch.zeros(3 * stride).as_strided(
                (3, entries, KV_HEADS), (stride, KV_HEADS, 1), stride - entries * KV_HEADS
            )
            cores = cores._replace(mass=mass)
        index = far = None
        if config.fetch_groups:
            index = index_pages_of(cache, TYPE, spec)
        if config.fetches_from_host:
            tokens = entries * spec.group_size
            kept = None
            if slots:
                memory = torch.zeros(KV_HEADS, slots, spec.group_size, 2 * DIM, dtype=TYPE)
                kept = GroupSlots.make(memory, (3, entries, KV_HEADS), clock_of(memory.device))
            far = FarPages(pages(tokens, tokens)[1], kept)
        return cls(config, spec, longest, raw, cores, index, far)

    @property
    def reading(self) -> Any:
        """How prompts are read, on a GPU."""
        return reading_of(self.config, "cuda", is_prompt=True)

    def start(self) -> None:
        """Do what a layer does without and with caches, before there is a request."""
        q, k, v, _ = tokens_of(MOST_NEW)
        sizes = (KV_HEADS, PAGE, self.longest, self.spec)
        if self.config.fetch_groups:
            attend_longest(q, *sizes, self.reading)
            compile_for_any_length(q, *sizes, self.reading)
            compile_merges(q, KV_HEADS, paged_rows.MOST_PARTS)
        else:
            attend_longest_chunk(q, *sizes)
            compile_for_any_batch(q, self.raw, self.cores, self.spec)
        slots = torch.zeros(len(q), dtype=torch.int64)
        pages = (self.raw, self.cores, self.spec, self.index, self.far)
        compile_for_any_prompt(q, (k, v, slots), *pages)
        self.step([1], [40])

    def step(self, counts: list[int], lengths: list[int]) -> None:
        """Run a step of sequences with so many new tokens and so many tokens."""
        q, k, v, out = tokens_of(sum(counts))
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        longest = self.longest if max(counts) == 1 else max(lengths)
        batch = Batch(starts, torch.tensor(lengths).int(), max(counts), longest)
        slots = torch.zeros(len(q), dtype=torch.int64)
        raw, cores = (x._replace(table=x.table[: len(counts)]) for x in (self.raw, self.cores))
        far, kept = self.far or FarPages(raw)
        stores_far = self.far is not None and max(counts) == 1
        if self.far is not None and not stores_far:
            store_tokens(k, v, slots, far)
            copy_tokens([(raw, far)] * 2, *torch.stack((slots, slots)))
        plan = PoolPlan.of(raw, cores, self.spec, q.shape[1], self.index, self.far)
        pool_pages(q, (k, v, slots), batch, (raw.table, cores.table), plan, stores_far)
        if not self.config.fetch_groups:
            parts = parts_of(starts.tolist(), lengths, batch)
            if any(part.kind is Kind.LONG for part in parts):
                attend_parts((q, k, v), parts, raw, cores, self.spec, out)
            else:
                attend_pages(q, batch, raw, cores, self.spec, out)
            return
        buffers = torch.zeros(2, 3, MOST_NEW, dtype=torch.int32)
        rows = write_rows(batch, buffers[1, 0, : len(counts)], len(q), buffers[0])
        full_until = 0 if self.config.fetches_from_host else self.reading.full_until
        for part in parts_of(starts.tolist(), lengths, batch, 1, WHOLE, full_until):
            run = part.tokens
            if part.kind is Kind.DECODING:
                pages = (raw, cores)
                choosing = (self.index, self.longest, self.spec, out[run], self.far)
                paged_rows.attend_rows(q[run], rows.part(run), pages, *choosing)
            elif part.kind is Kind.SHARING:
                pages = [x._replace(table=x.table[part.sequences]) for x in (far, cores)]
                tokens = (q[run], k[run], v[run])
                reading = (self.spec, self.reading, out[run], kept)
                attend_sharing(tokens, part.past, pages, *reading)


def tokens_of(count: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values as parts of one product, and memory for the output."""
    product = torch.empty(count, HEADS + 2 * KV_HEADS, DIM, dtype=TYPE)
    return *product.split([HEADS, KV_HEADS, KV_HEADS], 1), torch.empty(
        count, HEADS, DIM, dtype=TYPE
    )


def run_steps(server: Server, draw: random.Random) -> None:
    """Serve prompts of all lengths, one after the other, beside more and more decoding sequences;
    each number of these goes through a step by itself, too."""
    longest = server.longest
    special = [longest, longest - 3, WHOLE + 1, 9300, 600, 100, 33, 2]
    prompts = [*special, *(draw.randrange(longest) + 1 for _ in range(3))]
    draw.shuffle(prompts)
    decoding, read = 0, 0
    while prompts:
        counts, lengths = [1] * decoding, [longest] * decoding
        room = MOST_NEW - decoding
        while prompts and room:
            count = min(room, prompts[0] - read)
            counts.append(count)
            lengths.append(read + count)
            room -= count
            read += count
            if read == prompts[0]:
                prompts.pop(0)
                read = 0
        # A sequence with one new token comes before those with more.
        order = sorted(range(len(counts)), key=lambda i: counts[i] > 1)
        server.step([counts[i] for i in order], [lengths[i] for i in order])
        decoding = draw.randrange(60)
    for decoding in {int(1.3**i) for i in range(22)}:
        server.step([1] * decoding, [longest] * decoding)


def main() -> None:
    """Print the kernels of each server."""
    host = CCAConfig.preset("device", store="host")
    many = host.replace(store="device", fetch_groups=100, group_size=64)
    servers = {
        "host": (90, host, 33_792),
        "slots": (90, host, 70_000, 500),
        "many groups": (90, many, 33_792),
        "compact": (90, CCAConfig.pooling(group_size=16, window_size=1024), 33_792),
        "host, sm_80": (80, host, 33_792),
        "compact, sm_80": (80, CCAConfig.pooling(core_mass=False), 33_792),
    }
    for name, (capability, *settings) in servers.items():
        needed = stand_in(capability)
        server = Server.of(*settings)
        server.start()
        compiled = needed.copy()
        needed.clear()
        run_steps(server, random.Random(0))
        counts = Counter(kernel for kernel, _ in needed)
        late, unused = (
            sorted(kernel for kernel, _ in x) for x in (needed - compiled, compiled - needed)
        )
        print(json.dumps({"server": name, "counts": counts, "late": late, "unused": unused}))


main()
