"""Every architecture of TESTED computes what it should; others pass a self-check or are refused."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from families import (
    FAMILIES,
    MORE_FAMILIES,
    SMALL,
    oracle_logits,
    recompute,
    stateless,
    tiny_model,
    tokens,
)
from transformers import AutoModelForCausalLM, HunYuanDenseV1Config

import corecontext
from corecontext import CCAConfig, baselines
from corecontext.integrations.hf import attention_interface as hf_attention
from corecontext.integrations.hf import enabling as transformers
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.serve.request import Request
from corecontext.serve.scheduler import Scheduler

ROOT = Path(__file__).resolve().parent.parent
CONFIG = CCAConfig.paper(4, 9)
ALL = {**FAMILIES, **MORE_FAMILIES}
FIRST = {kind.model_type: family for family, (kind, _) in reversed(ALL.items())}
"""A family of each architecture, without sliding-window layers where there is one."""


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_more_families_equal_the_dense_oracle(family):
    model, ids = tiny_model(family), tokens(1, 26)
    expected = oracle_logits(model, ids, 4, 9)
    full = stateless(model, ids)
    assert (full - expected).abs().max() > 0.2  # the comparison means something
    with corecontext.enabled(model, CONFIG), torch.no_grad():
        torch.testing.assert_close(stateless(model, ids), expected, rtol=1e-4, atol=3e-5)
        before = model(ids[:, :14], use_cache=True)
        after = [
            model(ids[:, t : t + 1], **with_cache(returned_cache(before))).logits
            for t in range(14, 26)
        ]
        once = torch.cat((before.logits, *after), 1)
    torch.testing.assert_close(once, expected, rtol=1e-4, atol=3e-5)
    assert torch.equal(stateless(model, ids), full)


@pytest.mark.parametrize("family", FIRST.values())
def test_architectures_train_and_are_served(family):
    model, ids = tiny_model(family), tokens(1, 20)
    expected = gradients(model, ids)
    with corecontext.enabled(model, CCAConfig.paper(1, 5)):
        torch.testing.assert_close(gradients(model, ids), expected, rtol=1e-4, atol=1e-5)
        if transformers.handle_of(model).hybrid:
            return  # served by full attention only
        made = []
        scheduler = Scheduler(model, chunk_size=16, rows_per_pool=2, capture=False)
        scheduler.submit(Request(ids[0].tolist(), 4), made.append, lambda slot: None)
        while not scheduler.idle:
            scheduler.run_turn()
        assert made == recompute(model, ids, 4)[0, 20:].tolist()


# Architectures that no test has


def hunyuan():
    """A model that normalizes its keys after their rotation, by weights as training leaves them."""
    config = HunYuanDenseV1Config(**SMALL)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("family", ["llama", "smollm3", "glm4", "gemma3"])
def test_the_self_check_passes_models_that_are_right(family, monkeypatch):
    monkeypatch.setattr(transformers, "TESTED", ())
    monkeypatch.setattr(hf_attention, "TESTED", ())
    model, ids = tiny_model(family), tokens(1, 30)
    expected = stateless(model, ids)
    with pytest.raises(NotImplementedError, match=r"not tested.*untested=True\), or --untested"):
        corecontext.enable(model, CONFIG)
    with corecontext.enabled(model, CONFIG, untested=True) as handle:
        assert handle.config == CONFIG and handle.observer is None
        assert not torch.equal(stateless(model, ids), expected)
    assert torch.equal(stateless(model, ids), expected)


@pytest.mark.parametrize("training", [False, True])
def test_the_self_check_leaves_a_model_in_its_mode(training, monkeypatch):
    monkeypatch.setattr(transformers, "TESTED", ())
    monkeypatch.setattr(hf_attention, "TESTED", ())
    model = tiny_model("llama").train(training)
    corecontext.enable(model, CONFIG, untested=True)
    assert all(module.training == training for module in model.modules())
    refused = hunyuan().train(training)
    refused.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(NotImplementedError, match="changes its frequencies"):
        corecontext.enable(refused, CONFIG, untested=True)
    assert all(module.training == training for module in refused.modules())


def test_the_self_check_refuses_keys_that_do_not_rotate_as_the_model_says():
    model = hunyuan()
    with pytest.raises(NotImplementedError, match=r"self-check.*core_position='token'.*1e-03.*got"):
        corecontext.enable(model, CONFIG, untested=True)
    assert not hasattr(model.config, "cca") and model.config._attn_implementation == "sdpa"
    assert not model.training
    corecontext.enable(model, CONFIG.replace(core_position="token"), untested=True).disable()
    with pytest.raises(NotImplementedError, match="core_position='token'"):
        baselines.enable(model, baselines.StreamingLLM(), untested=True)


def test_a_model_that_was_never_adapted_says_so_once():
    model = tiny_model()
    with pytest.warns(UserWarning, match="not trained with CCA.*train.*sink_size=16") as caught:
        corecontext.enable(model, CONFIG).disable()
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    with pytest.warns(UserWarning, match="`corecontext train`. In Python warn=False") as caught:
        corecontext.enable(model, CONFIG.replace(sink_size=4)).disable()
    assert len(caught) == 1 and "sink" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corecontext.enable(model, CONFIG, warn=False).disable()
        model.config.cca = CONFIG.to_dict()
        corecontext.enable(model)


def test_the_table_of_models_is_that_of_the_tests():
    spec = importlib.util.spec_from_file_location("models", ROOT / "docs/models.py")
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    page = models.PAGE.read_text(encoding="utf-8")
    assert models.with_table(page) == page, "run: python docs/models.py --write"
    assert sorted(FIRST) == sorted(hf_attention.TESTED)
