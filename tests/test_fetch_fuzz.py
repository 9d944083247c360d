"""Random configurations of fetch, held to the dense reference in float64: results, gradients, and
caches filled in random pieces. `pytest tests/test_fetch_fuzz.py --fuzz 10000 --first 5000 -n 0`
draws more of them, from a number on; `check(draw_case(number))` repeats one.

A case in float32 may choose other groups than the reference where two groups are equal to within
rounding, or where a softcap makes them equal. Where a case is off, the reference is asked again at
inputs a few roundings away, and in float32: if its own results move as far, the case is at an edge,
else it failed.
"""

import functools
import os
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from budgets import Inputs, make_inputs, results_and_gradients

from corecontext import CCAConfig, Rotary, cca_attention
from corecontext.cache import new_layer
from corecontext.config.presets import PRESETS
from corecontext.ops.fetch import query_blocks

ALLOWED = {torch.float64: 1e-11, torch.float32: 2e-5}
"""Error of a row, of its norm or that of a usual row, the larger."""
NUDGE = 1e-6
"""Relative distance of inputs that are a few roundings away."""
NUDGES = 16
INDICES = ("mean", "oracle", "parts:{}:{}", "pairs:{}", "bits:{}")


class Case(NamedTuple):
    """One random configuration."""

    number: int
    inputs: Inputs
    settings: dict[str, Any]
    """Of `cca_attention`; in every tenth case those of a preset."""
    layout: str
    """"rows", "left", "right", "packed" or "positions"."""
    blocks: dict[str, int]
    """Constants of the portable path, which decide how it cuts and gathers."""


def draw_case(number: int) -> Case:
    """Draw everything from the number of the case."""
    draw = random.Random(f"fetch {number}")
    layout = draw.choice(("rows", "rows", "left", "right", "packed", "positions"))
    has_preset = number % 10 == 9
    preset = dict(PRESETS[draw.choice(list(PRESETS))].settings) if has_preset else {}
    length = preset.get("window_size", 0) + draw.randint(1, 260 if has_preset else 70)
    num_kv_heads = draw.choice((1, 1, 2, 3))
    num_heads = num_kv_heads * draw.choice((1, 2, 3, 4, 7, 8))
    head_dim = draw.choice((2, 4, 6, 8, 16))
    inputs = make_inputs(
        length,
        batch_size=1 if layout == "packed" else draw.choice((1, 2)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=draw.choice((torch.float64, torch.float32)),
        seed=number,
        with_lse=draw.random() < 0.5,
    )
    inputs = inputs._replace(q=inputs.q * draw.choice((0.1, 1, 1, 3)))
    settings = draw_sizes(draw, num_kv_heads) | draw_rule(draw, head_dim)
    if has_preset:
        # Texts of a few groups, of which 64 are all.
        preset["fetch_groups"] = min(preset["fetch_groups"], draw.choice((1, 3, 64)))
        del preset["store"]  # of a cache
        settings |= preset | {"num_groups": None}
    settings |= draw_layout(draw, layout, inputs)
    blocks = {
        "_GATHER_COST": draw.choice((0, 1, 16)),
        "_ELEMENTS": draw.choice((1, 500, 1 << 22)),
        "_BLOCK_QUERIES": draw.choice((1, 13, 128)),
    }
    return Case(number, inputs, settings, layout, blocks)


def draw_sizes(draw: random.Random, num_kv_heads: int) -> dict[str, Any]:
    """Draw g, s, sinks, k and how the k groups are chosen."""
    index = draw.choice(INDICES).format(draw.randint(1, 6), draw.choice((1, 2, 4)))
    if index.startswith(("pairs", "bits")):
        index = f"{index.partition(':')[0]}:{draw.choice((1, 2, 4))}"
    sizes: dict[str, Any] = {
        "group_size": draw.randint(1, 9),
        "window_size": draw.choice((1, 2, 5, 9, 17, 40)),
        "sink_size": draw.choice((0, 0, 1, 4, 11)),
        "fetch_groups": draw.choice((0, 1, 1, 2, 3, 4, 6, 9, 30)),
        "fetch_index": index,
        "fetch_share": draw.choice((1, 1, 1, 2, 3, 7, 16, 64)),
    }
    kind = draw.random()
    if kind < 0.2:
        sizes["group_size"] = tuple(draw.randint(1, 9) for _ in range(num_kv_heads))
    elif kind < 0.3:
        sizes["num_groups"] = draw.randint(1, 12)
    return sizes


def draw_rule(draw: random.Random, head_dim: int) -> dict[str, Any]:
    """Draw how core tokens are made and scored."""
    pairs = draw.randint(1, head_dim // 2)
    frequencies = Rotary.from_theta(draw.choice((10.0, 1e4)), 2 * pairs).inv_freq
    return {
        "core_mass": draw.random() < 0.5,
        "core_position": draw.choice(("middle", "token")),
        "rotary": Rotary(frequencies, interleaved=draw.random() < 0.3),
        "scale": draw.choice((None, None, 0.1, 0.7)),
        "softcap": draw.choice((None, None, None, 0.5, 3.0)),
    }


def draw_layout(draw: random.Random, layout: str, inputs: Inputs) -> dict[str, Any]:
    """Draw padding or documents."""
    batch, _, length, _ = inputs.q.shape
    place = torch.arange(length)
    if layout in ("left", "right"):
        pads = torch.tensor([draw.randint(0, length) for _ in range(batch)])[:, None]
        if layout == "left":
            return {"attention_mask": place >= pads}
        return {"attention_mask": place < length - pads}
    cuts = {draw.randint(1, length) for _ in range(draw.randint(0, 4))}
    if layout == "packed":
        return {"cu_seqlens": torch.tensor(sorted({0, length} | cuts))}
    if layout == "positions":
        starts = torch.zeros(length + 1, dtype=torch.long)
        starts[list(cuts)] = torch.tensor(list(cuts), dtype=torch.long)
        return {"position_ids": (place - starts[:length].cummax(0).values)[None]}
    return {}


def run(case: Case, inputs: Inputs, backend: str) -> dict[str, torch.Tensor]:
    """Return results and gradients."""
    attend = functools.partial(cca_attention, return_lse=True, backend=backend)
    return results_and_gradients(attend, inputs, **case.settings)


def largest_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a row, of its norm or that of a usual row."""
    worst = 0.0
    for name, wanted in truth.items():
        error = found[name].double() - wanted
        # Of padding the log-sum-exp is -inf in both.
        error = error.masked_fill((found[name] == wanted.to(found[name].dtype)), 0).norm(dim=-1)
        norm = wanted.masked_fill(wanted.isinf(), 0).norm(dim=-1)
        usual = max(1.0, float(norm.square().mean().sqrt()))
        share = error / norm.clamp(min=usual)
        worst = max(worst, float(share.nan_to_num(nan=torch.inf).max()))
    return worst


def is_at_an_edge(case: Case, truth: dict[str, torch.Tensor], error: float) -> bool:
    """Whether a few roundings move the reference itself by a quarter of this error or more."""
    if case.inputs.q.dtype == torch.float64:
        return False
    if largest_error(run(case, case.inputs, "reference"), truth) > error / 4:
        return True
    wide = case.inputs.to(torch.float64)
    generator = torch.Generator().manual_seed(case.number)
    for _ in range(NUDGES):
        nudged = [
            x * (1 + NUDGE * torch.randn(x.shape, generator=generator, dtype=x.dtype))
            for x in wide[:3]
        ]
        again = run(case, Inputs(*nudged, *wide[3:]), "reference")
        if largest_error(again, truth) > error / 4:
            return True
    return False


def fill_cache(case: Case) -> torch.Tensor | None:
    """Return what a cache gives that is filled in random pieces; None where it cannot be asked the
    same."""
    draw = random.Random(f"cache {case.number}")
    settings = dict(case.settings)
    rotary, scale, softcap = (settings.pop(name) for name in ("rotary", "scale", "softcap"))
    if case.layout != "rows" or settings["fetch_share"] > 1:
        return None
    if isinstance(settings["group_size"], tuple):
        settings["head_group_sizes"] = settings.pop("group_size")
    slots = draw.choice((0, *(settings["fetch_groups"] + more for more in (0, 1, 5))))
    store = draw.choice(("device", "host"))
    config = CCAConfig(**settings, store=store, fetch_slots=slots, prefill="fetch")
    length = case.inputs.q.shape[2]
    layer = new_layer(config, rotary, max_length=draw.choice((None, length)))
    outs = []
    start = 0
    while start < length:
        size = draw.choice((1, 1, 2, 7, length))
        if settings.get("num_groups") and start == 0:
            size = length  # g follows from the prompt's length
        pieces = [x[:, :, start : start + size].double() for x in case.inputs[:3]]
        outs.append(layer.attend(*pieces, scale=scale, softcap=softcap))
        start += size
    return torch.cat(outs, 2)


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> str:
    """Raise unless the portable path equals the reference; return the kind of the outcome."""
    for name, value in case.blocks.items():
        monkeypatch.setitem(getattr(query_blocks, name), "cpu", value)
    truth = run(case, case.inputs.to(torch.float64), "reference")
    dtype = case.inputs.q.dtype
    kind = str(dtype).removeprefix("torch.")
    error = largest_error(run(case, case.inputs, "packed"), truth)
    if error > ALLOWED[dtype]:
        at_edge = is_at_an_edge(case, truth, error)
        assert at_edge, f"case {case.number} is off by {error:.2e}: {case.settings}"
        kind = "at an edge"
    cached = fill_cache(case)
    if cached is None:
        return kind
    error = largest_error({"out": cached}, {"out": truth["out"]})
    where = f"the cache of case {case.number}: {error:.2e}, {case.settings}"
    assert error < ALLOWED[torch.float64], where
    return f"{kind}, with a cache"


@pytest.mark.timeout(0)
def test_random_configurations(request, monkeypatch, record_check):
    count = request.config.getoption("--fuzz")
    outcomes: Counter[str] = Counter()
    first = request.config.getoption("--first")
    for number in range(count):
        outcomes[check(draw_case(first + number), monkeypatch)] += 1
        if number % 100 == 99 and "PYTEST_XDIST_WORKER" not in os.environ:
            print(f"{number + 1} of {count} cases: {dict(outcomes)}", flush=True)
    edges = sum(number for kind, number in outcomes.items() if kind.startswith("at an edge"))
    assert edges <= 1 + count // 100
    command = f"python -m pytest tests/test_fetch_fuzz.py -n 0 --fuzz {count} --first {first}"
    record_check(command, check="fetch", cases=count, **outcomes)
