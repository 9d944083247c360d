"""Serve a model with random weights: `corecontext serve` for a folder with a config.json alone, and
on a GPU, with `--replay SHARE LENGTH`, with choices of groups that repeat (`replay.replayed`)."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from corecontext.cli import main
from corecontext.integrations.hf.attention_interface import full_attention
from corecontext.integrations.hf.enabling import enable
from corecontext.loading import Loaded, check_dtype, load_config, one_line, pick_device
from corecontext.methods import cca_config
from corecontext.serve import build


def load_random(
    source: str,
    *,
    dtype: str,
    device: str,
    untested: bool,
    warn: bool,
    **settings: Any,
) -> Loaded:
    """Make a model of the config's sizes on the device, and a tokenizer of made-up words; arguments
    as of `corecontext.loading.load`."""
    hf_config = load_config(source)
    check_dtype(dtype)
    device = pick_device(device)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    torch.manual_seed(0)
    with one_line("random weights cannot be made"), torch.device(device):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=getattr(torch, dtype), attn_implementation=full_attention(hf_config)
        )
    config = cca_config(hf_config, settings)
    enable(model.eval(), config, untested=untested, warn=False)
    count = hf_config.get_text_config(decoder=True).vocab_size
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return Loaded(model, PreTrainedTokenizerFast(tokenizer_object=words), config)


def serve(arguments: Sequence[str]) -> int:
    """Run the server with the options of `corecontext serve` and, maybe, that of a replay."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--replay", nargs=2)
    own, options = parser.parse_known_args(arguments)
    build.load = load_random  # type: ignore[assignment]
    with contextlib.ExitStack() as stack:
        if own.replay:
            from benchmarks.replay import replayed  # loads Triton

            share, length = own.replay
            stack.enter_context(replayed(float(share), int(length)))
        return main(["serve", *options])


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
