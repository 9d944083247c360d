"""Run each kind of stage: a function that yields the stage's records."""

import copy
import json
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.head_budget import COARSE, Shape, Unit, spread
from corecontext.files import atomic_path, write_text
from corecontext.integrations.hf.enabling import handle_of
from corecontext.record import Record, device_name, read_records
from corecontext.terminal import progress
from corecontext.visibility import group_size_for
from reproduction import scoring
from reproduction.attentions.pooled import Pooled
from reproduction.head_search import search_units
from reproduction.layers import layer_records
from reproduction.miniature import add_lora, attention, merge_lora
from reproduction.plan import Stage, adapt_steps, base_of, sizes_of
from reproduction.training_loop import Schedule, Watch
from reproduction.workspace import LAYERS, RECORDS, SHORT_WEIGHTS, WEIGHTS, Workspace

MAPPED_TOKENS = 512
SHORT_SHARE = 8  # of held-out text, one in so many tokens is read while a training is followed


def prepare(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Write the tokens; texts too short for a window are refused now, not after training."""
    work.corpus.prepare()
    for split in ("val", "test"):
        scoring.windows(work.corpus, work.size, split)
    yield from ()


def cost(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Time every method and size, and measure its cache, which do not depend on weights.

    All in one stage, so that no other stage on the same GPU disturbs some of them.
    """
    model = work.new_model(stage.seed).eval()
    cca = work.methods["cca"]
    # A method costs the same whether adapted or not, and other poolings cost what CCA does.
    candidates = [
        (method, "methods")
        for method in work.methods.values()
        if (method.trains or not work.size.is_brief) and not isinstance(method.config, Pooled)
    ]
    for g, s in sizes_of(work.size):
        config = cca.config.replace(group_size=g, window_size=s)
        candidates.append((cca._replace(config=config), "sizes"))
    with progress("time and cache", len(candidates)) as advance:
        for method, of in candidates:
            with attention(model, method.config):
                seconds, device, host = scoring.time_and_cache(model, work.size, work.device)
            if not work.size.is_brief:  # its stages share a GPU
                value = seconds if len(seconds) > 1 else seconds[0]
                yield work.record("model.first_token_s", value, method, stage, of=of)
            params = {"of": of} if host == 0 else {"of": of, "host_bytes": host}
            yield work.record("model.cache_bytes", device, method, stage, **params)
            advance(1)


def tune(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Train briefly from scratch with one rate, to choose the rate on validation text."""
    method = work.method(stage)
    model = work.new_model(stage.seed)
    size = work.size
    schedule = Schedule(size.tune_levels, size.step_tokens, stage.lr, stage.seed, method.trains)
    with attention(model, method.config):
        work.train(model, stage, schedule)
        yield from work.perplexity(model, method, stage, ("val",), lr=stage.lr)


def scratch(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Train a model from random weights with the best of the rates tried.

    A model of full attention is the base of every adaptation; its weights before the longest
    context are kept, too.
    """
    method = work.method(stage)
    size = work.size
    trials = [
        record
        for name in stage.needs
        for record in read_records(work.folder / name / RECORDS)
        if record.params.get("bucket") == "all"
    ]
    lr = stage.lr
    if trials:
        lr = min(trials, key=lambda record: record.value).params["lr"]
    model = work.new_model(stage.seed)
    is_base = method.config is None

    def keep(length: int) -> None:
        if is_base and len(size.levels) > 1 and length == size.levels[-2][0]:
            work.save(model, work.path(stage, SHORT_WEIGHTS))

    def follow(step: int) -> dict[str, float]:
        if step % size.follow_steps:
            return {}
        model.eval()
        nll = work.window_nll(model, "val", SHORT_SHARE)
        model.train()
        far = float(work.far(nll).mean())
        return {"val": round(float(nll.mean()), 5), "val_far": round(far, 5)}

    schedule = Schedule(size.levels, size.step_tokens, lr, stage.seed, method.trains)
    with attention(model, method.config):
        work.train(model, stage, schedule, watch=Watch(keep, follow))
        if is_base:
            work.save(model, work.path(stage, WEIGHTS))
        yield from work.measure(model, method, stage, lr=lr)


def layers(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Find the layers and KV heads of a base model that need small groups, the neediest first."""
    size = work.size
    model = work.load(base_of(size, stage.seed)).eval()
    shape = Shape(size.layers, size.kv_heads)
    config = work.methods["cca"].config
    fine = [method.fine for method in work.methods.values() if method.fine is not None]
    most_layers = max(count for kind, count in fine if kind == "layers")
    most_heads = max(count for kind, count in fine if kind != "layers")

    def loss(units: tuple[Unit, ...]) -> float:
        group_sizes = spread(shape, units, 1, COARSE * config.group_size)
        with attention(model, config.replace(layer_group_sizes=group_sizes)):
            nll = work.window_nll(model, "val", SHORT_SHARE)
        return float(work.far(nll).mean(dtype=np.float64))

    by_layer = search_units([Unit(layer) for layer in range(size.layers)], most_layers, loss)
    # Heads are searched in the quarter of the layers that need small groups most.
    alone = sorted(by_layer.trials[: size.layers], key=lambda trial: trial.loss)
    needy = [trial.unit.layer for trial in alone[: max(2, size.layers // 4)]]
    heads = [Unit(layer, head) for layer in needy for head in range(size.kv_heads)]
    by_head = search_units(heads, most_heads, loss)
    chosen = {"layers": by_layer.chosen, "heads": by_head.chosen}
    write_text(work.path(stage, LAYERS), json.dumps(chosen) + "\n")
    params = {
        "model": size.name,
        "stage": stage.name,
        "seed": stage.seed,
        "length": size.length,
        "split": "val",
    }
    trials = by_layer.trials + by_head.trials
    yield from layer_records(trials, params, device_name(work.device))


def adapt(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Adapt the base model to a method, all with the same batches, steps and rate.

    Stages of a size, and "short" from the weights before the longest context, take fewer steps.
    """
    method = work.method(stage)
    size = work.size
    brief = bool(stage.sizes) or stage.kind == "short"
    weights = SHORT_WEIGHTS if stage.kind == "short" else WEIGHTS
    model = work.load(base_of(size, stage.seed), weights)
    teacher = None
    if method.distil:
        teacher = copy.deepcopy(model).eval().requires_grad_(False)
    if method.trains == "lora":
        add_lora(model, stage.seed)
    steps = adapt_steps(size, stage, method)
    rate = size.adapt_lr * method.rate
    levels = ((size.length, steps),)
    schedule = Schedule(levels, size.adapt_tokens, rate, stage.seed, method.trains)
    with attention(model, method.config):
        work.train(model, stage, schedule, teacher=teacher)
        if method.trains == "lora":
            merge_lora(model)
        if stage.name in (f"cca-{size.seeds[0]}", f"full-{size.seeds[0]}"):
            work.save(model, work.path(stage, WEIGHTS))
        yield from work.measure(model, method, stage, brief=brief)


def zero(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Measure the base model under a method that it was never trained with."""
    model = work.load(base_of(work.size, stage.seed)).eval()
    method = work.method(stage)
    with attention(model, method.config):
        yield from work.measure(model, method, stage)


def flexibility(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Measure one set of weights at other group and window sizes (paper 4.3)."""
    model = work.load(stage.needs[0]).eval()
    method = work.method(stage)
    with attention(model, method.config):
        for g in work.size.groups:
            for s in work.size.windows:
                handle_of(model).configure(group_size=g, window_size=s)
                config = method.config.replace(group_size=g, window_size=s)
                changed = method._replace(config=config)
                yield from work.measure(model, changed, stage, brief=True)


def cloze(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Measure fixed-length choices with a constant number of groups (paper 3.6, C.3)."""
    size = work.size
    for name, num_groups in (("full", 0), ("cca", 16), ("cca", 64)):
        model = work.load(f"{name}-{stage.seed}").eval()
        method = work.methods[name]
        config = method.config
        groups = {}
        if num_groups:
            config = config.replace(num_groups=num_groups)
            g = group_size_for(size.length - 1, size.window, num_groups)
            groups = {"num_groups": num_groups, "group_size": g}
        with attention(model, config):
            right = scoring.cloze(model, work.corpus, size, work.device)
        params = {"task": "cloze", "questions": len(right), **groups}
        share = sum(right) / len(right)
        yield work.record("quality.accuracy", share, method, stage, **params)


def maps(work: Workspace, stage: Stage) -> Iterator[Record]:
    """Keep full attention's own weights on a held-out text."""
    model = work.load(base_of(work.size, stage.seed)).eval()
    tokens = min(MAPPED_TOKENS, work.size.length)
    ids = np.asarray(work.corpus.splits["test"][:tokens], np.int64)
    weights = scoring.attention_weights(model, torch.from_numpy(ids)[None].to(work.device))
    with atomic_path(work.path(stage, "maps.npz")) as name:
        np.savez(
            name,
            last=np.stack([layer[:, -1] for layer in weights]),
            short=np.stack([layer[:, :32, :32].mean(0) for layer in weights]),
            ids=ids,
        )
    task = "weight on the tenth of the keys that has most of it"
    method = work.methods["full_zero"]
    for number, layer in enumerate(weights):
        params = {"layer": number, "task": task, "tokens": len(ids)}
        yield work.record("quality.score", scoring.top_mass(layer), method, stage, **params)


KINDS: dict[str, Callable[[Workspace, Stage], Iterator[Record]]] = {
    "prepare": prepare,
    "cost": cost,
    "tune": tune,
    "scratch": scratch,
    "layers": layers,
    "adapt": adapt,
    "short": adapt,
    "zero": zero,
    "flexibility": flexibility,
    "cloze": cloze,
    "maps": maps,
}
"""The function of each kind of stage."""
