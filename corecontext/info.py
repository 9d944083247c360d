"""Estimate the costs and savings of CCA for a model, by arithmetic alone: no weights are loaded."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corecontext.cache.host_memory import available_bytes
from corecontext.config import CCAConfig
from corecontext.cost import CacheBytes, ModelCost, attention_flops, empty_model, fetch_flops
from corecontext.inference.limits import CACHE_SHARE, HOST_SHARES, rounded_down, rounded_up
from corecontext.inference.policy import Load, settings_for
from corecontext.inference.room import Needed, RowShape
from corecontext.loading import check_architecture, load_config, one_line
from corecontext.methods import PRESET, cca_config
from corecontext.model_sizes import ModelSizes
from corecontext.terminal import console
from corecontext.visibility import group_size_for, num_sinks

OFFERED = ("device", "default", "small")
"""The presets for a model that was not trained with core tokens, the fastest first."""
OWN = "the checkpoint's own"
"""Label of the settings in a checkpoint's config.json."""
FULL_ATTENTION = CCAConfig.paper(group_size=1, window_size=1)


def print_info(
    name: str,
    settings: Mapping[str, Any],
    lengths: Sequence[int] | None,
    untested: bool = False,
    gpu_gib: float | None = None,
    with_vllm: bool = False,
    host_gib: float | None = None,
) -> None:
    """Print which preset fits at the largest length, and operations and cache bytes for full
    attention and CCA by length, as on a GPU: in the checkpoint's dtype, with slots.

    Args:
        name: The model, as `load` takes it.
        settings: Those of CCA, by name, as `cca_config` takes them.
        lengths: Of prompts, in tokens; None takes `default_lengths`.
        untested: Accept a model type that no test has.
        gpu_gib: Memory of the GPU; None if unknown.
        with_vllm: Print the tokens too that vLLM's cache holds on this GPU.
        host_gib: Host memory beside the GPU; None takes what is available on this machine.
    """
    # Bad settings fail before the model is looked for.
    cca_config(None, settings)
    from corecontext.inference.limits import position_limit
    from corecontext.integrations.hf.attention_interface import full_layers
    from corecontext.integrations.hf.rotation import check_rope_type, layer_type_of
    from corecontext.integrations.vllm.capacity import capacity_table

    hf_config = load_config(name, alone=True)
    check_architecture(hf_config, untested)
    config = cca_config(hf_config, settings)
    with one_line(f"model '{name}' cannot be built"):
        model = empty_model(hf_config)
        cost = ModelCost.of(hf_config, model)
    limit = position_limit(hf_config) or 131072
    lengths = lengths or default_lengths(limit)
    with one_line():  # sizes by layer or head may not fit the model
        tables = [info_table(cost, config, lengths, hf_config.model_type)]
        if with_vllm:
            assert gpu_gib is not None, "capacity.gpu_gib asks for it"
            # vLLM's default is the preset "device".
            served = config
            if getattr(hf_config, "cca", None) is None and settings.get(PRESET) is None:
                served = cca_config(hf_config, {**settings, PRESET: "device"})
            tables.append(capacity_table(hf_config, cost, served, lengths, gpu_gib))
    if not settings:
        saved = config if getattr(hf_config, "cca", None) else None
        room = None
        if gpu_gib is not None:
            weights = cost.itemsize * sum(weight.numel() for weight in model.parameters())
            room = Room.of(gpu_gib, weights, host_gib)
        options = f"--model {shlex.quote(name)}{' --untested' if untested else ''}"
        advice = preset_advice(options, cost, saved, max(lengths), room)
        print(advice.verdict, advice.way, sep="\n")
        console().print(advice.table)
    console().print(*tables)
    console().print(
        f"weights read for each new token: {_bytes(cost.weight_bytes())}; cache in "
        f"{8 * cost.itemsize}-bit numbers; the model was built for {limit} tokens"
    )
    if config.core_position == "middle":
        try:
            check_rope_type(hf_config, layer_type_of(hf_config, full_layers(hf_config)[0]))
        except NotImplementedError as error:
            console().print(f"CCA cannot be enabled: {error}")


class Room(NamedTuple):
    """Hold the bytes that a server has for caches beside a GPU."""

    device: int
    """Bytes on the GPU."""
    host: float = math.inf
    """Bytes in host memory; infinite if unknown."""
    of_host: str = ""
    """Whose memory the bytes in host memory are a share of."""

    @classmethod
    def of(cls, gpu_gib: float, weights: int, host_gib: float | None) -> Room:
        """Return a server's shares of the memory of a GPU less `weights` bytes, and of host memory:
        as given in GiB, else of what is available on this machine."""
        device = max(0, int(CACHE_SHARE * (gpu_gib * 2**30 - weights)))
        available = available_bytes() if host_gib is None else int(host_gib * 2**30)
        if available is None:
            return cls(device)
        share = HOST_SHARES["cuda"]
        whose = "this machine's available" if host_gib is None else "the given"
        words = f"{share:.0%} of {whose} {_bytes(available)}"
        return cls(device, max(0, int(share * available)), words)

    def fits(self, needed: Needed) -> bool:
        """Whether there is room without other requests."""
        return needed.of_budget <= self.device

    @property
    def host_words(self) -> str:
        """The room in host memory in words."""
        if not self.of_host:
            return "unknown room, which --host-memory states"
        return f"room for {_bytes(self.host)} ({self.of_host})"


def needed_for(cost: ModelCost, config: CCAConfig | None, length: int, room: Room) -> Needed:
    """Count the bytes of a request of `length` tokens, under full attention where `config` is None:
    in a server, or of a model with sliding-window layers, which none takes, in `generate`, whose
    one cache is that into which the prompt is read."""
    sizes = ModelSizes(cost.query_heads, cost.kv_heads, cost.head_dim, cost.num_layers)
    shape = RowShape(sizes, cost.itemsize, room.device / max(1, room.host))
    config = config and _sized(config, length)
    if not cost.windows:
        return shape.needed(config, rounded_up(length), room.device)
    device, host = shape.reading_of(config, length)
    cache = CacheBytes(device + cost.sliding_bytes(length), host)
    return Needed(CacheBytes(0, 0), cache, shape.budget_bytes(cache))


def longest_fitting(
    cost: ModelCost, configs: Mapping[str, CCAConfig], length: int, room: Room
) -> tuple[str, int]:
    """Return the settings that fit the most tokens below `length`, and how many, one of the lengths
    that a server gives to rows; ("", 0) if none fit."""
    while length > 1 and (length := rounded_down(length - 1)):
        for label, config in configs.items():
            if room.fits(needed_for(cost, config, length, room)):
                return label, length
    return "", 0


class Advice(NamedTuple):
    """Say which settings fit on a GPU and in host memory, and how many bytes each takes."""

    verdict: str
    """A line: the settings that fit, or that none do."""
    way: str
    """The command that takes them; a way out where none fits."""
    table: Table


def preset_advice(
    options: str, cost: ModelCost, saved: CCAConfig | None, length: int, room: Room | None
) -> Advice:
    """Choose the first settings under which a server, or `generate` where none takes the model,
    holds a request of `length` tokens, or those that hold the most tokens of it.

    Args:
        options: Of commands, by which they load the model.
        saved: The checkpoint's settings, tried before the presets; None if it has none.
        room: Bytes for caches. None if unknown: then the checkpoint's settings are taken, or the
            preset `default`.
    """
    configs = {preset: CCAConfig.preset(preset) for preset in OFFERED}
    if saved is not None:
        configs = {OWN: saved, **configs}
    offered = {"full attention": None, **configs}
    costs = {
        label: mean_bytes(cost, _sized(config or FULL_ATTENTION, length), length)
        for label, config in offered.items()
    }
    if room is None:
        fitting = "default" if saved is None else OWN
        table = _advice_table(costs, length)
        return Advice(_takes(fitting, costs, length, room), _run(options, cost, fitting), table)
    needed = {label: needed_for(cost, config, length, room) for label, config in offered.items()}
    table = _advice_table(costs, length, room, needed)
    for label in configs:
        if room.fits(needed[label]):
            verdict = _takes(label, costs, length, room, needed[label])
            return Advice(verdict, _run(options, cost, label), table)
    reason = _too_much(needed, [*configs], room)
    label, longest = longest_fitting(cost, configs, length, room)
    if label:
        verdict = f"{label} fits {longest} tokens, not {length}: those take {reason}"
        return Advice(verdict + _pointer(label), _run(options, cost, label, longest), table)
    return Advice(
        f"nothing fits: {length} tokens take {reason}",
        "take a smaller --length, a larger GPU, more host memory, or weights of fewer bits",
        table,
    )


def _takes(
    label: str,
    costs: Mapping[str, CacheBytes],
    length: int,
    room: Room | None,
    needed: Needed | None = None,
) -> str:
    """Say what the cache of `length` tokens takes under settings that fit, or may fit."""
    device, host = costs[label]
    slots = ", slots included" if host else ""
    full = costs["full attention"].device
    verdict = (
        f"{label}{'' if room is None else ' fits'}: {length} tokens take {_bytes(device)} on the "
        f"device{slots}, where full attention takes {_bytes(full)}"
    )
    if host:
        verdict += f", and {_bytes(host)} in host memory"
    if host and room is not None and needed is not None:
        if needed.row.host and needed.reading.host:
            verdict += f", {_bytes(needed.host)} while they are read"
        verdict += f", with {room.host_words}"
    return verdict + _pointer(label)


def _too_much(needed: Mapping[str, Needed], labels: Sequence[str], room: Room) -> str:
    """Say which memory a request has too little of under settings none of which fit: host memory
    under the first that would fit on the device, else the device under those that take least."""
    label = next((label for label in labels if needed[label].device <= room.device), None)
    if label is not None:
        return (
            f"{_bytes(needed[label].host)} in host memory with {label} while they are read, "
            f"with {room.host_words}"
        )
    label = min(labels, key=lambda label: needed[label].device)
    return (
        f"{_bytes(needed[label].device)} on the device with {label} while they are read, "
        f"with room for {_bytes(room.device)}"
    )


def _pointer(label: str) -> str:
    """Say where a preset's measured quality and time are; nothing of a checkpoint's settings, which
    only its user can measure."""
    return "" if label == OWN else "; quality and time, as measured: docs/choose.md"


def _run(options: str, cost: ModelCost, label: str, max_length: int | None = None) -> str:
    """Return the line with the command that takes a model under settings."""
    if label != OWN:
        options += f" --preset {label}"
    if cost.windows:
        return f"run: corecontext generate {options} --prompt-file FILE"
    limit = "" if max_length is None else f" --max-length {max_length}"
    return f"run: corecontext serve {options}{limit}"


def _advice_table(
    costs: Mapping[str, CacheBytes],
    length: int,
    room: Room | None = None,
    needed: Mapping[str, Needed] | None = None,
) -> Table:
    """Make the table of the bytes that each of the settings takes, full attention first, and where
    the room is known of whether a server has it."""
    title = f"the cache of {length} tokens, slots included"
    if room is not None:
        title += f", with room for {_bytes(room.device)}"
        if room.of_host:
            title += f" and {_bytes(room.host)} in host memory"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("settings")
    for column in ("on the device", "", "in host memory"):
        table.add_column(column, justify="right")
    if room is not None:
        table.add_column("fits")
    full = costs["full attention"].device
    for label, (device, host) in costs.items():
        ratio = f"{full / device:.1f}x less" if device < full else "more" if device > full else ""
        cells = [label, _bytes(device), ratio, _bytes(host) if host else ""]
        if room is not None and needed is not None:
            cells.append("yes" if room.fits(needed[label]) else "no")
        table.add_row(*cells)
    return table


def default_lengths(limit: int) -> list[int]:
    """Return powers of two from 4096, and the model's limit."""
    return [n for n in (2**i for i in range(12, 24)) if n < limit] + [limit]


def info_table(cost: ModelCost, config: CCAConfig, lengths: Sequence[int], kind: str) -> Table:
    """Make the table of a model of type `kind`: a row for each length."""
    fractions = _fractions(cost, config)
    sinks = num_sinks(config.sink_size, max(fractions))
    # The title names the settings that the columns depend on.
    title = (
        f"{kind}: {cost.num_layers} full-attention layers, {cost.query_heads} query and "
        f"{cost.kv_heads} KV heads of {cost.head_dim}, "
    )
    if config.num_groups:
        title += f"{config.num_groups} groups"
    else:
        title += f"g = {' or '.join(map(str, fractions))}"
    title += f", s = {config.window_size}"
    if sinks:
        title += f", the first {sinks} tokens raw"
        if sinks != config.sink_size:
            title += f" (sink_size {config.sink_size}, in whole groups)"
    if config.core_mass:
        title += ", with masses"
    if config.fetch_groups:
        title += f", {config.fetch_groups} groups fetched by {config.fetch_index}"
        title += f", raw tokens on the {config.store}"
    caption = "operations: a multiplication or an addition each"
    if config.fetches_from_host:
        caption += "; cache: slots included"
    # Three columns a quantity: full attention, CCA, and their ratio.
    table = Table(title=title, box=SIMPLE_HEAD, caption=caption)
    table.add_column("length", justify="right", no_wrap=True)
    for quantity in ("attention", "first token", "cache"):
        for column in (f"{quantity}\nfull", "\nCCA", ""):
            table.add_column(column, justify="right", no_wrap=True)
    if config.fetches_from_host:
        table.add_column("in host\nmemory", justify="right", no_wrap=True)
    for length in lengths:
        sized = _sized(config, length)
        full = _costs(cost, length, FULL_ATTENTION)
        compact = [0.0, 0.0, 0.0, 0.0]  # the mean of `_costs` over KV heads
        for g, fraction in _fractions(cost, sized).items():
            costs = _costs(cost, length, sized.replace(group_size=g))
            compact = [total + fraction * value for total, value in zip(compact, costs)]
        *compared, host = compact
        cells = []
        for before, after, shown in zip(full, compared, (_flops, _flops, _bytes)):
            cells += [shown(before), shown(after), f"{before / after:.1f}x"]
        if config.fetches_from_host:
            cells.append(_bytes(host))
        table.add_row(str(length), *cells)
    return table


def _sized(config: CCAConfig, length: int) -> CCAConfig:
    """Return the settings of a prompt of `length` tokens: g in place of `num_groups`, and the slots
    of a GPU, whatever this machine has."""
    sized = settings_for(config, None, None, length, None, Load())
    return sized.replace(fetch_slots=config.slots_for(length, on_gpu=True))


def _fractions(cost: ModelCost, config: CCAConfig) -> dict[int, float]:
    """Return the fraction of all KV heads that has each g."""
    layers = [config.of_layer(layer) for layer in range(cost.num_layers)]
    sizes = [g for layer in layers for g in _group_size_by_head(layer, cost.kv_heads)]
    return {g: sizes.count(g) / len(sizes) for g in sorted(set(sizes))}


def mean_bytes(cost: ModelCost, config: CCAConfig, length: int) -> CacheBytes:
    """Return bytes of the cache of `length` tokens; each g counts by its fraction of KV heads."""
    fractions = _fractions(cost, config)
    if config.num_groups:  # g follows from the length
        fractions = {group_size_for(length, config.window_size, config.num_groups): 1.0}
    device, host = 0.0, 0.0
    for g, fraction in fractions.items():
        costs = cost.config_bytes(config.replace(group_size=g, num_groups=None), length)
        device += fraction * costs.device
        host += fraction * costs.host
    return CacheBytes(round(device), round(host))


def _costs(cost: ModelCost, length: int, config: CCAConfig) -> tuple[float, ...]:
    """Return four numbers: operations of attention and of the first token, bytes of the cache on
    the device and in host memory."""
    g, s = config.group_size, config.window_size
    sinks = num_sinks(config.sink_size, g)
    attention = attention_flops(
        length, cost.query_heads, cost.head_dim, group_size=g, window_size=s, sinks=sinks
    )
    fetch = cost.num_layers * fetch_flops(config, length, cost.query_heads, cost.head_dim)
    first_token = cost.prefill_flops(length, g, s, sinks) + fetch
    return (cost.num_layers * attention + fetch, first_token, *cost.config_bytes(config, length))


def _group_size_by_head(config: CCAConfig, kv_heads: int) -> tuple[int, ...]:
    """Return g of each KV head of a layer."""
    sizes = config.head_group_sizes or (config.group_size,) * kv_heads
    if len(sizes) != kv_heads:
        raise ValueError(
            f"group sizes by head must be one for each of the {kv_heads} KV heads, got {sizes}."
        )
    return sizes


def _with_prefix(value: float, step: int, prefixes: tuple[str, ...]) -> str:
    """Format a value with three figures and a prefix, each of which means `step` of the one before;
    the last prefix takes all larger values."""
    for prefix in prefixes[:-1]:
        if value < step:
            digits = max(0, 3 - len(str(int(value))))
            return f"{value:.{digits}f} {prefix}".rstrip()
        value /= step
    return f"{value:.3g} {prefixes[-1]}"


_flops = partial(_with_prefix, step=1000, prefixes=("", "k", "M", "G", "T", "P", "E"))
_bytes = partial(_with_prefix, step=1024, prefixes=("B", "KiB", "MiB", "GiB", "TiB"))
