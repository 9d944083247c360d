"""Group sizes by layer: results, generation, and the message of every mistake."""

import pytest
import torch
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from corecontext import CCAConfig, enable, enabled, from_pretrained
from corecontext.inference import Engine
from corecontext.integrations.hf.cache_name import returned_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), layers=3)


def ids(n: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(256, (rows, n), generator=torch.Generator().manual_seed(n))


def test_models_generate_what_they_would_recompute(folder):
    model = from_pretrained(folder, CCAConfig.paper(window_size=8, layer_group_sizes=(2, 4, 8)))
    prompt = ids(30)
    wanted = prompt
    for _ in range(12):
        wanted = torch.cat((wanted, model(wanted, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), wanted)
    assert torch.equal(
        model.generate(prompt, cache_implementation="static", disable_compile=True, **options),
        wanted,
    )
    assert (
        Engine(model, chunk_size=7).generate(prompt, max_new_tokens=12)[0]
        == wanted[0, 30:].tolist()
    )


def test_sizes_by_layer_are_sizes_of_layers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = CCAConfig.paper(window_size=8, layer_group_sizes=(1, 4, 8))
    with enabled(model, config) as handle, torch.no_grad():
        cache = returned_cache(model(ids(64), use_cache=True))
        assert [layer.compact.group_size for layer in cache.layers] == [1, 4, 8]
        handle.configure(group_size=2)
        cache = returned_cache(model(ids(64), use_cache=True))
        assert [layer.compact.group_size for layer in cache.layers] == [2, 2, 2]
    with (
        enabled(model, config.replace(layer_group_sizes=(4, 4, 4))),
        enabled_same(model, folder) as same,
    ):
        assert torch.equal(model(ids(64)).logits, same(ids(64)).logits)


class enabled_same:
    """The same model with one g for all."""

    def __init__(self, model, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def __enter__(self):
        enable(self.model, CCAConfig.paper(group_size=4, window_size=8))
        return self.model

    def __exit__(self, *error):
        pass


def test_mistakes_are_said(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    for settings, message in (
        ({"layer_group_sizes": (4, 0)}, "layer_group_sizes must be at least 1"),
        ({"layer_group_sizes": (4,), "num_groups": 3}, "both set g"),
    ):
        with pytest.raises(ValueError, match=message):
            CCAConfig.paper(**settings)
    with pytest.raises(ValueError, match="each of the 3 full-attention layers, got 2"):
        enable(model, CCAConfig.paper(layer_group_sizes=(4, 4)))
    assert "_corecontext" not in model.__dict__
