"""One process of test_tensor_parallel.py: python tensor_parallel.py MODEL OUTPUT, with torchrun's variables set."""

import os
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import corecontext
from corecontext import CCAConfig
from corecontext.inference import Engine, prefill


def main(folder: str, output: str) -> None:
    """Logits of a prompt and tokens after it, split over the processes where there are several."""
    split = int(os.environ.get("WORLD_SIZE", "1")) > 1
    model = AutoModelForCausalLM.from_pretrained(folder, **(
        {"distributed_config": DistributedConfig(tp_plan="auto")} if split else {})).eval()
    if torch.cuda.is_available() and not split:
        model.cuda()
    corecontext.enable(model, CCAConfig(4, 10))
    ids = torch.randint(2, 256, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    out = prefill(model, ids, mask, chunk_size=25)
    heads = out.cache.layers[0].compact.keys.shape[1]
    tokens = Engine(model).generate(ids, mask, max_new_tokens=16)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({"whole": whole.cpu(), "last": out.logits.cpu(), "tokens": tokens, "heads": heads,
                    "device": model.device.type}, output)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
