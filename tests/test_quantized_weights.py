"""Checkpoints with 8-bit and 4-bit weights, loaded through transformers, work under CCA as they
are."""

import pytest
import torch
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

import corecontext
from corecontext import CCAConfig
from corecontext.inference import Engine
from corecontext.integrations.hf.enabling import handle_of

quantization = pytest.importorskip("torchao.quantization", reason="needs the extra 'quant'")


def recompute(model, ids, count):
    """Greedy tokens by full forwards without a cache."""
    made = []
    with torch.no_grad():
        for _ in range(count):
            made.append(int(model(ids, use_cache=False).logits[0, -1].argmax()))
            ids = torch.cat((ids, torch.tensor([[made[-1]]])), 1)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_generates_the_same_however_it_is_run(kind, folder, tmp_path):
    from transformers import TorchAoConfig

    settings = {"weight_dtype": torch.int4} if kind.startswith("Intx") else {}
    config = TorchAoConfig(getattr(quantization, kind)(**settings))
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(weight) is not torch.nn.Parameter and "torchao" in type(weight).__module__
    ids = torch.randint(2, 256, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids).logits
    with corecontext.enabled(model, CCAConfig.paper(4, 10)):
        expected = recompute(model, ids, 12)
        for static, cache_dtype in ((False, "auto"), (True, "auto"), (True, "int8")):
            handle_of(model).configure(cache_dtype=cache_dtype)
            made = Engine(model, static=static, chunk_size=17).generate(ids, max_new_tokens=12)[0]
            if cache_dtype == "auto":
                assert made == expected
            else:
                assert len(made) == 12
        handle_of(model).configure(cache_dtype="auto")
        out = model.generate(ids, max_new_tokens=12, do_sample=False)
        assert out[0, 60:].tolist() == expected
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_a_saved_checkpoint_on_the_command_line(folder, tmp_path, capsys):
    from transformers import AutoTokenizer, TorchAoConfig

    from corecontext.cli import main

    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a text of some length " * 5)
    command = (
        f"generate --model {tmp_path} --prompt-file {prompt} --max-new-tokens 6 --preset "
        "pooling --group-size 4 --window-size 10 --device cpu"
    )
    assert main(command.split()) == 0
    assert capsys.readouterr().out.strip()
