"""Send mixed requests to `vllm serve` with fetch, by the openai client and by `vllm bench serve`:
`PYTHONPATH=. python tests/vllm_serve.py MINUTES [device|host [random|smollm2]]`, store and model.

On a GPU decoding steps are captured; without one kernels run in Triton's interpreter.

Prompts of many lengths, half of which begin alike; some clients leave before their answer ends.
Prints a record of the faults seen: answers that are not those of our Engine, requests and pages in
use at the end, memory that grows; with the megabytes of the server, and of its GPU, on which
nothing else may run, when it had answered each prompt once, in the middle of the mixed requests, at
their end, and behind `vllm bench serve`.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import torch
import vllm
import vllm_engine
from openai import OpenAI
from vllm_engine import GPU, say

from corecontext import CCAConfig
from corecontext.inference import Engine
from corecontext.record import device_name, make_record
from reproduction.real.served import NAME, VLLM, served

TOKENS = 12
CLIENTS = 16 if GPU else 4
MOST_GROWN = 256
"""Megabytes by which the server may grow in the second half of the time."""
LEAVES = 0.2
"""Share of the requests whose client leaves."""
MODEL = Path(__file__).parent.parent / "corecontext" / "assets" / "demo_model"
ENTRY_POINTS = {
    "vllm.platform_plugins": "interpreted = vllm_cpu:platform",
    "vllm.general_plugins": "core_context = corecontext.integrations.vllm.plugin:register",
}
STEPS = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
if not GPU:
    STEPS = '{"custom_ops":["none"]} --enforce-eager'
SERVED = f"""--attention-backend CUSTOM --dtype float32 --gpu-memory-utilization 0.1
    --max-num-seqs {CLIENTS} --compilation-config {STEPS}"""
SIZES = {
    "random": "--block-size 8 --max-model-len 256 --max-num-batched-tokens 64",
    "smollm2": "--block-size 16 --max-model-len 1024 --max-num-batched-tokens 512",
}
CACHE_BYTES = {"random": 8 << 20, "smollm2": 768 << 20}
BENCH = f"""bench serve --model {NAME} --dataset-name random --num-prompts {2 * CLIENTS}
    --random-input-len 60 --random-output-len 6 --ignore-eos"""


def install(folder: Path) -> dict[str, str]:
    """Write entry points by which vLLM finds its plug-ins; return the environment of its
    processes."""
    for name, version in (("core_context_cpu", "0"), ("vllm", vllm.__version__))[: 2 - GPU]:
        made = folder / f"{name}-{version}.dist-info"
        made.mkdir()
        made.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        if version == "0":
            lines = [f"[{group}]\n{entry}\n" for group, entry in list(ENTRY_POINTS.items())[GPU:]]
            made.joinpath("entry_points.txt").write_text("".join(lines))
    here = Path(__file__).parent
    paths = (str(here.parent), str(here), str(folder), os.environ.get("PYTHONPATH", ""))
    given = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # The test of the engine has it in one process, on V1.
    given |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": str(int(GPU))}
    return {**os.environ, **given}


def megabytes(process: int) -> list[int]:
    """Return the memory of a process with those that it started, and what is used of a GPU."""
    server = psutil.Process(process)
    host = sum(each.memory_info().rss for each in (server, *server.children(recursive=True)))
    free, whole = torch.cuda.mem_get_info() if GPU else (0, 0)
    return [host >> 20, whole - free >> 20]


def metric(url: str, name: str) -> float:
    """Return one of the server's metrics."""
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def ask(client: OpenAI, prompt: list[int], leaves: bool) -> list[int] | None:
    """Return the tokens of an answer, or leave before it ends."""
    options = {"model": NAME, "max_tokens": TOKENS, "temperature": 0.0}
    more = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(prompt=prompt, stream=leaves, extra_body=more, **options)
    if leaves:
        for _ in zip(range(3), answer):
            pass
        answer.close()
        return None
    return answer.choices[0].token_ids


def main(minutes: float, store: str, name: str) -> dict:
    """Run the server and its clients, and return what was seen."""
    fetch = {**vllm_engine.FETCH, "store": store}
    config = CCAConfig.pooling(**vllm_engine.CCA).replace(core_mass=True, **fetch)
    if name == "smollm2":
        config = CCAConfig.preset("device").replace(fetch_groups=4, prefill="full", store=store)
    counts = dict.fromkeys(("requests", "left", "wrong"), 0)
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plugins:
        if name == "random":
            model = vllm_engine.checkpoint(folder, config, False, "llama", {"vocab_size": 264})
            for file in MODEL.glob("tokenizer*"):
                Path(folder, file.name).write_bytes(file.read_bytes())
            texts = vllm_engine.prompts(24, False)
        else:
            model = vllm_engine.real_checkpoint(folder, config)
            texts = vllm_engine.real_prompts(folder, 96)
        saved = json.loads(Path(folder, "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps({**saved, "cca": config.to_dict()}))
        # One cache for all prompts: in caches of their own each would pin memory and capture steps.
        engine = Engine(model, max_length=max(map(len, texts)) + TOKENS)
        inputs = [torch.tensor([text], device=model.device) for text in texts]
        wanted = [engine.generate(prompt, max_new_tokens=TOKENS)[0] for prompt in inputs]
        say("our Engine answered")
        environment = install(Path(plugins))
        options = f"{SERVED} {SIZES[name]} --kv-cache-memory-bytes {CACHE_BYTES[name]}"
        with served(folder, options.split(), environment) as server:
            say("the server runs")
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)

            def check(number: int, leaves: bool) -> None:
                tokens = ask(client, texts[number], leaves)
                with lock:
                    counts["requests"] += 1
                    counts["left"] += leaves
                    counts["wrong"] += not leaves and list(tokens) != list(wanted[number])

            for number in range(len(texts)):
                check(number, False)
            taken = [megabytes(server.process)]
            half = threading.Timer(30 * minutes, lambda: taken.append(megabytes(server.process)))
            half.start()
            say("each prompt was answered once")
            end = time.monotonic() + 60 * minutes

            def work(seed: int) -> None:
                own = random.Random(seed)
                while time.monotonic() < end:
                    check(own.randrange(len(texts)), own.random() < LEAVES)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            say(f"{counts['requests']} requests, {counts['wrong']} wrong")
            half.join()
            taken.append(megabytes(server.process))
            grown = max(end - middle for middle, end in zip(taken[1], taken[2]))
            bench = [*VLLM, *BENCH.split(), "--base-url", server.url, "--tokenizer", folder]
            done = subprocess.run(bench, env=environment, stdout=sys.stderr)
            time.sleep(5)
            return {
                **counts,
                "bench_serve": done.returncode,
                "shared_tokens": metric(server.url, "prefix_cache_hits_total"),
                "running": metric(server.url, "num_requests_running")
                + metric(server.url, "num_requests_waiting"),
                "pages_in_use": metric(server.url, "kv_cache_usage_perc"),
                "megabytes": [*taken, megabytes(server.process)],
                "grown": grown,
            }


if __name__ == "__main__":
    minutes, store, model = (*sys.argv[1:], *("device", "random")[len(sys.argv) - 2 :])
    seen = main(float(minutes), store, model)
    failed = sum(seen[name] != 0 for name in ("bench_serve", "running", "pages_in_use"))
    failed += seen["grown"] > MOST_GROWN
    params = {"check": "vllm serve", "minutes": float(minutes), "store": store, "model": model}
    device = device_name("cuda" if GPU else "cpu")
    record = make_record("checks.failed", failed + seen["wrong"], {**params, **seen}, device=device)
    print(record.to_json(), flush=True)
