"""Write random models as GGUF files with random legal metadata, and unpack them: each is the model
that wrote it, or is refused in one line.

    python tests/fuzz_gguf.py --count 500 --first 0
"""

import argparse
import os
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from families import YARN
from test_gguf import VOCABULARY, add_merged_tokens, add_scored_tokens, llama3

from corecontext.files import UserError
from corecontext.integrations.hf.gguf_files import local_model

FAMILIES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma3": transformers.Gemma3TextConfig,
}
DTYPES = {"F32": torch.float32, "F16": torch.float16}
TEXT = "in the sand and that the hat"


def draw_config(draw: random.Random, family: str) -> Any:
    """Draw sizes and the rotation of a model of one or two layers."""
    heads = draw.choice((1, 2, 4))
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32 * draw.choice((1, 2, 3)),
        "intermediate_size": 32 * draw.randint(1, 4),
        "num_hidden_layers": draw.choice((1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "head_dim": draw.choice((16, 32)),
        "max_position_embeddings": draw.choice((64, 512, 8192)),
        "rms_norm_eps": draw.choice((1e-5, 1e-6, 3e-4)),
        "tie_word_embeddings": draw.random() < 0.4,
    }
    theta = draw.choice((10000.0, 500000.0, 123.5))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = draw.choice(("default", "default", "linear", "yarn", "llama3"))
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": draw.choice((2.0, 8.0))}
    elif kind == "yarn":
        rope = YARN | {"rope_theta": theta, "factor": draw.choice((2.0, 4.0))}
    elif kind == "llama3" and family == "llama":
        sizes["head_dim"] = 32
        rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    if family == "gemma3":
        sizes |= {"sliding_window": draw.choice((4, 16)), "query_pre_attn_scalar": 0}
        sizes["query_pre_attn_scalar"] = sizes["head_dim"]
        near = {"rope_type": "default", "rope_theta": 10000.0}
        rope = {"full_attention": rope, "sliding_attention": near}
    return FAMILIES[family](**sizes, rope_parameters=rope)


def write(draw: random.Random, family: str, model: Any, path: Path) -> None:
    """Write a model, whose weights become those of the file."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    add_rotation(draw, writer, config)
    scored = family == "gemma3" or (family == "llama" and draw.random() < 0.5)
    (add_scored_tokens if scored else add_merged_tokens)(writer)
    add_metadata(draw, writer)
    kind = draw.choice(("F32", "F32", "F16", "BF16", "Q8_0"))
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[family],
        config.num_hidden_layers,
    )
    stored = DTYPES.get(kind, torch.bfloat16)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        of_tensor = kind if weight.dim() == 2 else "F32"
        if kind == "Q8_0" and weight.shape[-1] % 32:
            of_tensor = "F32"
        quantization = gguf.GGMLQuantizationType[of_tensor]
        values = weight.numpy().copy()
        packed = gguf.quantize(values, quantization)
        weight.copy_(torch.from_numpy(gguf.dequantize(packed, quantization)).to(stored))
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            packed = gguf.quantize(paired(values, config.head_dim), quantization)
        if family == "gemma3" and name.endswith("norm.weight"):
            packed = values + 1
        stored_name = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(stored_name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paired(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the rows of a projection with the pairs of a rotation side by side."""
    split = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return split.swapaxes(1, 2).reshape(values.shape)


def add_rotation(draw: random.Random, writer: Any, config: Any) -> None:
    """Add what the file says about frequencies."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if draw.random() < 0.7:
        writer.add_rope_dimension_count(config.head_dim)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    elif draw.random() < 0.3:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(llama3(rope["rope_theta"]), np.float32))


def add_metadata(draw: random.Random, writer: Any) -> None:
    """Add fields that change no number."""
    fields = (
        lambda: writer.add_name(draw.choice(("", "a model", "名前\n", "x" * 5000))),
        lambda: writer.add_author("somebody"),
        lambda: writer.add_tags(["a", "b"]),
        lambda: writer.add_languages(["en"]),
        lambda: writer.add_file_type(draw.choice((0, 1, 7, 15))),
        lambda: writer.add_quantization_version(2),
        lambda: writer.add_custom_alignment(draw.choice((8, 32, 64, 256))),
        lambda: writer.add_vocab_size(VOCABULARY),
        lambda: writer.add_bos_token_id(draw.randrange(3)),
        lambda: writer.add_eos_token_id(draw.randrange(3)),
        lambda: writer.add_pad_token_id(draw.randrange(3)),
        lambda: writer.add_add_bos_token(draw.random() < 0.5),
        lambda: writer.add_add_eos_token(False),
        lambda: writer.add_add_space_prefix(True),
        lambda: writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}"),
        lambda: writer.add_array("general.datasets", [1, 2, 3]),
        lambda: writer.add_uint64("general.parameter_count", 2**40),
        lambda: writer.add_float64("custom.number", draw.random()),
        lambda: writer.add_bool("custom.flag", True),
    )
    for add in draw.sample(fields, draw.randint(0, len(fields))):
        add()


def check(number: int, folder: Path) -> str:
    """Write and unpack a model; return "equal" or the reason of a refusal."""
    draw = random.Random(f"gguf {number}")
    family = draw.choice(list(FAMILIES))
    torch.manual_seed(number)
    config = draw_config(draw, family)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    path = folder / f"{number}.gguf"
    case = f"case {number}, {config}"
    ids = torch.randint(3, VOCABULARY, (1, 50))
    with torch.no_grad():
        write(draw, family, model, path)
        try:
            unpacked = local_model(str(path))
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 600, case
            return f"{family}: {error}".replace(str(path), "FILE")
        read = transformers.AutoModelForCausalLM.from_pretrained(unpacked, dtype=torch.float32)
        error = (read(ids).logits - model(ids).logits).abs().max() / model(ids).logits.std()
    assert error < 1e-3, f"{case}: off by {error}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(unpacked)
    text = tokenizer.decode(tokenizer(TEXT)["input_ids"], skip_special_tokens=True)
    assert text.strip() == TEXT, f"{case}: {text!r}"
    return f"{family}: equal"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for number in range(options.first, options.first + options.count):
        with tempfile.TemporaryDirectory() as name:
            os.environ["XDG_CACHE_HOME"] = name
            outcomes[check(number, Path(name))] += 1
    for outcome, count in outcomes.most_common():
        print(count, outcome)
