"""The two processes of test_tensor_parallel.py: python tensor_parallel.py MODEL OUTPUT PORT fork.

With GPUs, spawn instead of fork, which copies this process and its imports.
"""

import os
import sys

import torch
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import corecontext
from corecontext import CCAConfig
from corecontext.cache import parts_of
from corecontext.inference import Engine, prefill


def main(folder: str, output: str) -> None:
    """Logits of a prompt and tokens after it, split over the processes where there are several."""
    split = int(os.environ.get("WORLD_SIZE", "1")) > 1
    model = AutoModelForCausalLM.from_pretrained(
        folder, **({"distributed_config": DistributedConfig(tp_plan="auto")} if split else {})
    ).eval()
    if torch.cuda.is_available() and not split:
        model.cuda()
    ids = torch.randint(2, 256, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    found = {}
    for name, config in (
        ("equal", CCAConfig.paper(4, 10)),
        ("by head", CCAConfig.paper(8, 10, layer_group_sizes=(4, (8, 1)))),
        ("fetch", CCAConfig.pooling(4, 10, sink_size=4, prefill="fetch", fetch_groups=3)),
        ("fetch from host", CCAConfig.paper(4, 10, prefill="fetch", fetch_groups=3, store="host")),
    ):
        with corecontext.enabled(model, config):
            with torch.no_grad():
                whole = model(ids, use_cache=False).logits
            out = prefill(model, ids, mask, chunk_size=25)
            parts = [part for layer in out.cache.layers for part in parts_of(layer.compact)]
            tokens = Engine(model).generate(ids, mask, max_new_tokens=16)
            found[name] = {
                "whole": whole.cpu(),
                "last": out.logits.cpu(),
                "tokens": tokens,
                "heads": [(part.keys.shape[1], part.group_size) for part in parts],
                "device": model.device.type,
            }
    torch.save(found, f"{output}.{os.environ.get('RANK', '0')}")


def process(rank: int, folder: str, output: str, port: str) -> None:
    """Run one of two ranks, with the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    torch.set_num_threads(1)
    main(folder, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    *arguments, method = sys.argv[1:]
    start_processes(process, tuple(arguments), nprocs=2, start_method=method)
