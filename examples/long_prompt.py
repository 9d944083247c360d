"""Ask a question at the end of a long text, under CCA.

python examples/long_prompt.py [--model DIR] [--text FILE]
"""

import argparse
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoTokenizer

import corecontext
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache

ASSETS = Path(str(files("corecontext"))) / "assets"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "demo_model"))
    parser.add_argument("--text", default=str(ASSETS / "document.txt"))
    parser.add_argument("--question", default="\nThe name of the author is")
    parser.add_argument("--max-characters", type=int, default=8000)
    options = parser.parse_args()

    config = corecontext.CCAConfig.pooling(window_size=512)
    model = corecontext.from_pretrained(options.model, config).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = Path(options.text).read_text(encoding="utf-8")[: options.max_characters]
    prompt = tokenizer(text + options.question, return_tensors="pt")

    with torch.inference_mode():
        out = model.generate(
            **prompt, max_new_tokens=30, do_sample=False, return_dict_in_generate=True
        )
    tokens = prompt["input_ids"].shape[1]
    size = cache_bytes(returned_cache(out))
    print(f"{tokens} tokens in the prompt, {size} bytes in the cache")
    print(options.question.strip() + tokenizer.decode(out.sequences[0, tokens:]))


if __name__ == "__main__":
    main()
