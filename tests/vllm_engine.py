"""Generate by vLLM's whole engine with core context, and by our Engine: `python
tests/vllm_engine.py V1|V2 CASE`, with vLLM's model runner of that name.

Prints one JSON line: the requests whose greedy tokens are not those of our Engine, of one forward
over all tokens, or of the same request alone; tokens of prompts that came from shared pages, those
of them that came from offloaded ones, preemptions and accepted drafts. On a GPU it is vLLM as it
is. Without one it is vLLM's CPU build with our kernels in Triton's interpreter, and with V2 those
of vLLM's runner too.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

RUNNER = (*sys.argv, "V1")[1]
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(RUNNER == "V2"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # which compiles a function of vLLM's for many workers
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # Workers are loaded anew: vLLM must find this file's platform in them.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

# ruff: noqa: E402 (vLLM reads the environment and its platform when it is imported)
import triton.backends

if RUNNER == "V2" and not GPU:
    # vLLM's CPU build loads the kernels of V2 only beside a Triton for CPUs: here the interpreter.
    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver)

import vllm.platforms

if not GPU:  # before modules of vLLM take the platform's object; in its workers too
    import vllm_cpu

    vllm.platforms._current_platform = vllm_cpu.Interpreted()
    vllm.platforms.current_platform = vllm.platforms._current_platform

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.sched.scheduler import Scheduler

from corecontext import CCAConfig, enable
from corecontext.inference import Engine
from corecontext.integrations.hf.gguf_files import local_model
from corecontext.integrations.vllm import plugin
from corecontext.ops.fetch import prompt_rule
from corecontext.ops.triton.paged import chunk as paged_chunk

# Our Engine's steps choose, as vLLM's do.
prompt_rule.STEP_LENGTHS.clear()
prompt_rule.WHOLE_TOKENS.clear()
LONG_CHUNK = paged_chunk.LONG_CHUNK


NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}
CCA = {"group_size": 4, "window_size": 10, "sink_size": 4}
FETCH = {"fetch_groups": 2, "fetch_index": "bits:2", "prefill": "full", "store": "device"}
ALL_GROUPS = {"fetch_groups": 16}
START = time.perf_counter()
COUNTS = {"accepted": 0, "preempted": 0, "loaded": 0}
CASES = {
    "plain": {},
    "mass": {"core_mass": True},
    "long chunks": {"core_mass": True, "long_chunk": 8},
    "small cache": {"tokens": 30, "short": True, "num_gpu_blocks_override": 13},
    "fetch": {"fetch": {}, "tokens": 8, "alone": 5},
    "fetch, small cache": {"fetch": {}, "tokens": 30, "short": True, "num_gpu_blocks_override": 26},
    # Tied: the last token is a likely next one, and so are drafts.
    "drafts": {"tokens": 16, "tied": True, "speculative_config": NGRAMS},
}
# Chunks begin at multiples of a share where requests run one by one.
CASES["fetch, shared choices"] = {
    **CASES["fetch"],
    "fetch": {"prefill": "auto", "fetch_share": 8},
    "full_until": 24,
    "max_num_seqs": 1,
}
CASES["fetch, offload"] = {**CASES["fetch"], "offload": 1 << 26}
HOST = {"store": "host", "fetch_slots": 3}
CASES["fetch, host"] = {**CASES["fetch"], "fetch": HOST}
CASES["fetch, host, shared choices"] = {
    **CASES["fetch, shared choices"],
    "fetch": {"store": "host", "prefill": "auto", "fetch_share": 8},
}
# A step chooses all groups, so a preempted request may read its answer again as a prompt.
CASES["fetch, all groups, small cache"] = {**CASES["fetch, small cache"], "fetch": ALL_GROUPS}
# The longest requests leave groups out.
CASES["fetch, 64 requests"] = {
    **CASES["fetch"],
    "fetch": {"fetch_groups": 1, "window_size": 4},
    "tokens": 2,
    "few": True,
    "requests": 64,
    "engine": 16,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 96,
}
FEW_GROUPS = CASES["fetch, 64 requests"]["fetch"]
CASES["fetch, host, 64 requests"] = {**CASES["fetch, 64 requests"], "fetch": {**FEW_GROUPS, **HOST}}
CASES["fetch, host, all groups, small cache"] = {
    **CASES["fetch, all groups, small cache"],
    "fetch": {**ALL_GROUPS, "store": "host"},
}
CASES["fetch, drafts"] = {**CASES["drafts"], "fetch": {"fetch_index": "pairs:2"}}
CASES["fetch, host, small cache"] = {**CASES["fetch, small cache"], "fetch": HOST}
CASES["fetch, host, drafts"] = {**CASES["drafts"], "fetch": {"fetch_index": "pairs:2", **HOST}}
# Heads that keep every token: in a layer, in another layer, in a whole layer.
CASES["raw heads"] = {
    "layer_group_sizes": ((1, 4), 4, 1),
    "core_mass": True,
    "long_chunk": 8,
    "alone": 5,
    "shape": {"num_hidden_layers": 3},
}
CASES["raw heads, small cache"] = {
    **CASES["small cache"],
    "layer_group_sizes": ((1, 4), 4),
    "num_gpu_blocks_override": 44,
}
CASES["raw heads, drafts"] = {**CASES["drafts"], "layer_group_sizes": ((1, 4), (4, 1))}
FOUR_HEADS = {"shape": {"num_key_value_heads": 4}}
CASES["raw pairs"] = {**FOUR_HEADS, "layer_group_sizes": ((1, 4, 4, 1), 1), "overrides": True}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES["llama 2"] = FOUR_HEADS
CASES["llama 3"] = {"shape": {"rope_parameters": LLAMA_3}}
CASES["mistral"] = {"family": "mistral", "shape": {"sliding_window": None}}
CASES["qwen2"] = {"family": "qwen2"}
CASES["qwen3"] = {"family": "qwen3", "shape": {"head_dim": 32}}
DECODING_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
if GPU:
    CASES["captured"] = {"enforce_eager": False, "compilation_config": DECODING_GRAPHS}
    CASES["raw heads, captured"] = {**CASES["raw heads"], **CASES["captured"]}
    CASES["graphs"] = {"enforce_eager": False, "compilation_config": {}}
    CASES["many"] = {
        **CASES["captured"],
        "tokens": 24,
        "requests": 64,
        "engine": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 96,
        "num_gpu_blocks_override": 400,
    }
    CASES["fetch, captured"] = {**CASES["fetch"], **CASES["captured"]}
    CASES["fetch, host, captured"] = {**CASES["fetch, host"], **CASES["captured"]}
    CASES["fetch, graphs"] = {**CASES["fetch"], **CASES["graphs"]}
    CASES["fetch, host, graphs"] = {**CASES["fetch, host"], **CASES["graphs"]}
    CASES["fetch, many"] = {**CASES["many"], "fetch": {}, "num_gpu_blocks_override": 600}
    CASES["fetch, host, many"] = {**CASES["fetch, many"], "fetch": HOST}
    CASES["real"] = {
        **CASES["captured"],
        "real": True,
        "long_chunk": 256,
        "tokens": 24,
        "requests": 64,
        "engine": 4,
        "alone": 4,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 2 << 30,
        "block_size": 16,
    }
    # So few groups that a choice leaves most tokens out.
    preset = {"group_size": 32, "window_size": 160, "sink_size": 16, "fetch_groups": 4}
    # The host holds 8 times the bytes of a page.
    sizes = {"engine": 16, "max_num_seqs": 16, "kv_cache_memory_bytes": 768 << 20}
    CASES["real, fetch"] = {**CASES["real"], **sizes, "fetch": preset}
    CASES["real, fetch, host"] = {**CASES["real, fetch"], "fetch": {**preset, "store": "host"}}
    CASES["real, fetch, drafts"] = {**CASES["real, fetch"], "speculative_config": NGRAMS}
    CASES["real, fetch, host, drafts"] = {
        **CASES["real, fetch, host"],
        "speculative_config": NGRAMS,
    }
    # Room for about five requests, which a step sees whole.
    CASES["real, fetch, all groups, small cache"] = {
        **CASES["real, fetch"],
        "fetch": {**preset, "fetch_groups": 64},
        "kv_cache_memory_bytes": 112 << 20,
    }
    few = {2: 2, 18: 2, 20: 0, 24: 0}  # layers and their heads that keep every token
    raw = [tuple(1 if few.get(i) == head else 16 for head in range(3)) for i in range(30)]
    CASES["real, raw heads"] = {**CASES["real"], "layer_group_sizes": tuple(raw)}
    preset = {**preset, "fetch_groups": 64, "prefill": "auto"}
    CASES["qwen3, 16K"] = {
        **CASES["fetch, captured"],
        "family": "qwen3",
        "shape": {"head_dim": 128, "num_key_value_heads": 1, "max_position_embeddings": 16640},
        "spread": 2.0,  # of norms' weights: sharp attention
        "lengths": (16600, 16384, 8300),
        "fetch": preset,
        "max_model_len": 16640,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": 128 << 20,
        "block_size": 16,
    }
    CASES["qwen3, 16K, host"] = {**CASES["qwen3, 16K"], "fetch": {**preset, "store": "host"}}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
if not GPU or torch.cuda.device_count() > 1:
    for name in [name for name in CASES if name.startswith(("plain", "captured", "fetch"))]:
        CASES[f"two workers, {name}"] = {**CASES[name], **TENSOR_PARALLEL}
    CASES["two workers, raw heads"] = {**TENSOR_PARALLEL, "layer_group_sizes": ((4, 1), 4)}
    CASES["two stages, raw heads"] = {
        "pipeline_parallel_size": 2,
        "layer_group_sizes": ((1, 4), 1, 4),
        "shape": {"num_hidden_layers": 3},
    }


def prompts(
    requests: int, short: bool, lengths: tuple[int, ...] = (), few: bool = False
) -> list[list[int]]:
    """Prompts of many lengths, some of which begin alike; or short ones alone, whose answers need
    most of the pages; or prompts of given lengths; or of few tokens."""
    draw = random.Random(0)
    begun = [draw.randrange(128) for _ in range(70)]
    texts = [[draw.randrange(128) for _ in range(length)] for length in (1, 7, 61)]
    if lengths:
        return [[draw.randrange(128) for _ in range(length)] for length in lengths]
    if few:
        sizes = [(draw.choice((0, 3, 17)), draw.randint(1, 6)) for _ in range(requests)]
        return [begun[:n] + [draw.randrange(128) for _ in range(m)] for n, m in sizes]
    if short:
        return [begun[i : i + 5] for i in range(4)]
    texts += [[*begun[:66], 1], [*begun, 2, 3]]
    for _ in range(requests - len(texts)):
        added = [draw.randrange(128) for _ in range(draw.randint(1, 30))]
        texts.append(begun[: draw.randrange(70)] + added)
    return texts


def checkpoint(
    folder: str, config: CCAConfig, tied: bool, family: str, shape: dict, spread: float = 0.2
) -> PreTrainedModel:
    """Save a random model with these settings, and return it with core context; weights of norms
    and biases spread so far."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "tie_word_embeddings": tied,
        **shape,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and weights of norms, which begin as constants
            parameter.data += spread * torch.randn_like(parameter)
    if tied:
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data *= 0.4
            layer.mlp.down_proj.weight.data *= 0.4
    model.save_pretrained(folder)
    enable(model, config, warn=False)
    return model.cuda() if GPU else model


def real_checkpoint(folder: str, config: CCAConfig) -> PreTrainedModel:
    """Save SmolLM2 with these settings in float32, and return it with core context."""
    source = local_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    enable(model, config, warn=False)
    return model.cuda() if GPU else model


def real_prompts(folder: str, requests: int) -> list[list[int]]:
    """Prompts of many lengths from a page of this project, half of which begin alike."""
    page = Path(__file__).parent.parent / "docs" / "math.md"
    tokens = AutoTokenizer.from_pretrained(folder)(page.read_text())["input_ids"]
    draw = random.Random(0)
    texts = []
    for number in range(requests):
        first = 0 if number % 2 else draw.randrange(len(tokens) - 700)
        texts.append(tokens[first : first + draw.randint(1, 700)])
    return texts


def say(text: str) -> None:
    """Print progress."""
    print(f"{time.perf_counter() - START:.0f} s: {text}", file=sys.stderr, flush=True)


@torch.inference_mode()
def is_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of an answer is the likeliest by one forward over all of them."""
    tokens = torch.tensor([prompt + answer[:-1]], device=model.device)
    if model.config.cca["fetch_groups"]:
        # The prompt is read by its rule, each token of the answer chooses, as a draft does.
        share = model.config.cca["fetch_share"]
        cached = max(0, len(prompt) - 2) // share * share
        past = model(tokens[:, :cached], use_cache=True).past_key_values if cached else None
        rest = {"past_key_values": past, "use_cache": True, "logits_to_keep": len(answer)}
        logits = model(tokens[:, cached:], **rest).logits[0]
    else:
        logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 :]
    if logits.argmax(-1).tolist() == answer:
        return True
    chosen = logits.gather(1, torch.tensor(answer, device=model.device)[:, None])
    say(f"prompt of {len(prompt)}: {(logits.amax(-1, True) - chosen).amax():.2g} below the best")
    return False


def forget(worker) -> None:
    """Fill all pages, so that whatever of them is not brought back shows."""
    if GPU:
        torch.cuda.synchronize()
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        pages = torch.empty(0, dtype=torch.uint8, device=layer.kv_cache.device)
        pages.set_(layer.kv_cache.untyped_storage()).fill_(63)


def run(name: str, options: dict) -> dict:
    """Run a case, and return its line."""
    options = dict(options)
    count = options.pop("tokens", 6)
    requests = options.pop("requests", 5)
    real = options.pop("real", False)
    sizes = options.pop("layer_group_sizes", None)
    mass = options.pop("core_mass", False)
    config = CCAConfig.pooling(**CCA, core_mass=mass, layer_group_sizes=sizes)
    if real:
        config = CCAConfig.pooling(16, 64, sink_size=16, core_mass=True, layer_group_sizes=sizes)
    fetch = options.pop("fetch", None)
    if fetch is not None:
        config = config.replace(core_mass=True, **{**FETCH, **fetch})
    tied = options.pop("tied", False)
    family = options.pop("family", "llama")
    short, few = options.pop("short", False), options.pop("few", False)
    paged_chunk.LONG_CHUNK = options.pop("long_chunk", LONG_CHUNK)
    prompt_rule.PROMPT_LENGTHS["cuda" if GPU else "cpu"] = options.pop("full_until", 8192)
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
    settings = {
        "enforce_eager": True,
        "compilation_config": {} if GPU else {"custom_ops": ["none"]},
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 8 << 20,
        "max_model_len": 128,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 4,
        "block_size": 8,
    }
    with tempfile.TemporaryDirectory() as folder:
        if real:
            model = real_checkpoint(folder, config)
            texts = real_prompts(folder, requests)
        else:
            shape, spread = options.pop("shape", {}), options.pop("spread", 0.2)
            model = checkpoint(folder, config, tied, family, shape, spread)
            texts = prompts(requests, short, options.pop("lengths", ()), few)
        saved = json.loads(Path(folder, "config.json").read_text())
        if options.pop("overrides", False):
            settings["hf_overrides"] = {"cca": config.to_dict()}
        else:
            saved["cca"] = config.to_dict()
        Path(folder, "config.json").write_text(json.dumps(saved))
        engine = Engine(model)
        device = engine.model.device
        wanted = [
            engine.generate(torch.tensor([prompt], device=device), max_new_tokens=count)[0]
            for prompt in texts[: options.pop("engine", requests)]
        ]
        say("our Engine generated")
        alone = options.pop("alone", 0)
        offload = options.pop("offload", 0)
        if offload:
            extra = {"cpu_bytes_to_use": offload}
            if not GPU:
                extra.update(spec_name="CopyingSpec", spec_module_path="vllm_offload")
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="CoreContextConnector",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            )
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            attention_backend="CUSTOM",
            seed=0,
            enable_prefix_caching=True,
            **{**settings, **options},
        )
        say("vLLM started")
        inputs = [{"prompt_token_ids": prompt} for prompt in texts]
        singles = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in inputs[:alone]]
        if offload:
            # A further step, which stores the pages of the last request.
            llm.generate(inputs[0], params, use_tqdm=False)
            assert llm.reset_prefix_cache()
            llm.collective_rpc(forget)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        say("vLLM generated")
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    pairs = list(zip(texts, tokens))
    not_greedy = [i for i, pair in enumerate(pairs) if not is_greedy(model, *pair)]
    say("forwards compared")
    return {
        "case": name,
        "runner": "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1",
        "wrong": [i for i, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]],
        "not_greedy": not_greedy,
        "not_as_alone": [
            i for i, output in enumerate(singles) if list(output.outputs[0].token_ids) != tokens[i]
        ],
        "requests": len(tokens),
        "shared": sum(output.num_cached_tokens or 0 for output in outputs),
        **COUNTS,
    }


def counted(method, name, amount):
    """A method of the scheduler whose calls add to a count."""

    def call(*args, **kwargs):
        COUNTS[name] += amount(*args, **kwargs)
        return method(*args, **kwargs)

    return call


plugin.register()  # as the entry point of an installed package does

if __name__ == "__main__":
    sys.modules["vllm_engine"] = sys.modules[__name__]
    preempt, accept = Scheduler._preempt_request, Scheduler.make_spec_decoding_stats
    Scheduler._preempt_request = counted(preempt, "preempted", lambda *given, **named: 1)
    accepted = counted(accept, "accepted", lambda *given, **named: named["num_accepted_tokens"])
    Scheduler.make_spec_decoding_stats = accepted
    load = OffloadingConnectorScheduler.update_state_after_alloc
    loaded = counted(load, "loaded", lambda scheduler, request, pages, tokens: tokens)
    OffloadingConnectorScheduler.update_state_after_alloc = loaded
    print(json.dumps(run(sys.argv[2], CASES[sys.argv[2]])), flush=True)
