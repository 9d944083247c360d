"""Send mixed requests to `vllm serve` with fetch on a CPU, by the openai client and by `vllm bench
serve`: `python tests/vllm_serve.py MINUTES`.

Prompts of many lengths, half of which begin alike; some clients leave before their answer ends.
Prints a record of the faults seen: answers that are not those of our Engine, requests and pages in
use at the end; with the megabytes of the server when it had answered each prompt once and then.
"""

import contextlib
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

import torch
import vllm
from openai import OpenAI
from vllm_engine import CCA, checkpoint

from corecontext import CCAConfig
from corecontext.inference import Engine
from corecontext.record import make_record

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
TOKENS = 12
CLIENTS = 4
LEAVES = 0.2
"""Share of the requests whose client leaves."""
MODEL = Path(__file__).parent.parent / "corecontext" / "assets" / "demo_model"
ENTRY_POINTS = {
    "vllm.platform_plugins": "interpreted = vllm_cpu:platform",
    "vllm.general_plugins": "core_context = corecontext.integrations.vllm.plugin:register",
}
SERVED = (
    *("--attention-backend", "CUSTOM", "--dtype", "float32", "--enforce-eager"),
    *("--compilation-config", '{"custom_ops": ["none"]}', "--block-size", "8"),
    *("--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(8 << 20)),
)
BENCH = (
    *("bench", "serve", "--base-url", URL, "--dataset-name", "random", "--num-prompts", "8"),
    *("--random-input-len", "60", "--random-output-len", "6", "--ignore-eos"),
)


def install(folder: Path) -> dict[str, str]:
    """Write entry points by which vLLM finds its plug-ins; return the environment of its processes,
    whose kernels run in Triton's interpreter."""
    for name, version in (("core_context_cpu", "0"), ("vllm", vllm.__version__)):
        made = folder / f"{name}-{version}.dist-info"
        made.mkdir()
        made.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        if version == "0":
            lines = [f"[{group}]\n{entry}\n" for group, entry in ENTRY_POINTS.items()]
            made.joinpath("entry_points.txt").write_text("".join(lines))
    here = Path(__file__).parent
    paths = (str(here.parent), str(here), str(folder))
    # The test of the engine has it in one process.
    given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **given, "OMP_NUM_THREADS": "1"}


def megabytes(process: int) -> int:
    """Return the memory of a process and of those that it started."""
    status = Path(f"/proc/{process}/status").read_text()
    kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return kib // 1024 + sum(megabytes(int(child)) for child in children)


def metric(name: str) -> float:
    """Return one of the server's metrics."""
    lines = urllib.request.urlopen(f"{URL}/metrics").read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@contextlib.contextmanager
def served(folder: str, environment: dict[str, str], log: Path):
    """Start the server, and stop it."""
    program = Path(sys.executable).with_name("vllm")
    command = [program, "serve", folder, "--served-model-name", "m", "--port", str(PORT), *SERVED]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            while True:
                assert process.poll() is None, log.read_text()[-3000:]
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{URL}/health")
                    break
                time.sleep(1)
            yield process.pid
        finally:
            process.terminate()
            process.wait(60)


def ask(client: OpenAI, prompt: list[int], leaves: bool) -> list[int] | None:
    """Return the tokens of an answer, or leave before it ends."""
    options = {"max_tokens": TOKENS, "temperature": 0.0}
    more = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model="m", prompt=prompt, stream=leaves, extra_body=more, **options
    )
    if leaves:
        for _ in zip(range(3), answer):
            pass
        answer.close()
        return None
    return answer.choices[0].token_ids


def main(minutes: float) -> dict:
    """Run the server and its clients, and return what was seen."""
    fetch = {"fetch_groups": 2, "fetch_index": "bits:2", "prefill": "full", "store": "device"}
    config = CCAConfig.pooling(**CCA, core_mass=True).replace(**fetch)
    draw = random.Random(0)
    begun = [draw.randrange(256) for _ in range(150)]
    prompts = [
        [*begun[: draw.randrange(150) * (i % 2)], *(draw.randrange(256) for _ in range(3 + 2 * i))]
        for i in range(24)
    ]
    counts = dict.fromkeys(("requests", "left", "wrong"), 0)
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plugins:
        model = checkpoint(folder, config, False, "llama", {"vocab_size": 264})
        saved = json.loads(Path(folder, "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps({**saved, "cca": config.to_dict()}))
        for file in MODEL.glob("tokenizer*"):
            Path(folder, file.name).write_bytes(file.read_bytes())
        engine = Engine(model)
        wanted = [
            engine.generate(torch.tensor([prompt]), max_new_tokens=TOKENS)[0] for prompt in prompts
        ]
        environment = install(Path(plugins))
        with served(folder, environment, Path(plugins, "log")) as server:
            client = OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=600)

            def check(number: int, leaves: bool) -> None:
                tokens = ask(client, prompts[number], leaves)
                with lock:
                    counts["requests"] += 1
                    counts["left"] += leaves
                    counts["wrong"] += not leaves and list(tokens) != list(wanted[number])

            for number in range(len(prompts)):
                check(number, False)
            before = megabytes(server)
            end = time.monotonic() + 60 * minutes

            def work(seed: int) -> None:
                own = random.Random(seed)
                while time.monotonic() < end:
                    check(own.randrange(len(prompts)), own.random() < LEAVES)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            program = Path(sys.executable).with_name("vllm")
            bench = [program, *BENCH, "--model", "m", "--tokenizer", folder]
            done = subprocess.run(bench, env=environment, capture_output=True, text=True)
            time.sleep(5)
            return {
                **counts,
                "bench_serve": done.returncode,
                "shared_tokens": metric("prefix_cache_hits_total"),
                "running": metric("num_requests_running") + metric("num_requests_waiting"),
                "pages_in_use": metric("kv_cache_usage_perc"),
                "megabytes": [before, megabytes(server)],
            }


if __name__ == "__main__":
    seen = main(float(sys.argv[1]))
    failed = sum(seen[name] != 0 for name in ("bench_serve", "running", "pages_in_use"))
    params = {"check": "vllm serve", "minutes": float(sys.argv[1]), **seen}
    print(make_record("checks.failed", failed + seen["wrong"], params).to_json(), flush=True)
