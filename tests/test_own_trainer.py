"""The plug-in under transformers' Trainer and under PEFT: training, saving, resuming, merging."""

import pytest
import torch
from families import tiny_model, tokens

import corecontext
from corecontext import CCAConfig
from corecontext.integrations.hf.enabling import handle_of

CONFIG = CCAConfig.paper(group_size=4, window_size=9)
pytest.importorskip("accelerate", reason="Trainer needs accelerate")


def trainer(folder, model, steps, **options):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 40)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)


def test_trainer_learns_resumes_and_its_checkpoint_loads_enabled(tmp_path):
    model = tiny_model()
    corecontext.enable(model, CONFIG)
    run = trainer(tmp_path / "a", model, 6)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    resumed = tiny_model()
    corecontext.enable(resumed, CONFIG)
    trainer(tmp_path / "a", resumed, 6).train(
        resume_from_checkpoint=str(tmp_path / "a/checkpoint-3")
    )
    for a, b in zip(model.parameters(), resumed.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)  # resuming equals never stopping
    loaded = corecontext.from_pretrained(str(tmp_path / "a/checkpoint-6"))
    assert handle_of(loaded).config == CONFIG
    with torch.no_grad():
        ids = tokens(1, 50)
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)


def test_trainer_with_checkpointing_and_autocast(tmp_path):
    model = tiny_model()
    corecontext.enable(model, CONFIG)
    run = trainer(tmp_path, model, 4, gradient_checkpointing=True, bf16=True)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and torch.isfinite(torch.tensor(run.evaluate()["eval_loss"]))


def test_lora_trains_its_own_weights_only_and_merges():
    peft = pytest.importorskip("peft")
    ids = tokens(2, 50)
    base = tiny_model()
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"])
    )
    handle = corecontext.enable(wrapped, CONFIG)
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        wrapped(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, p in wrapped.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)
    with torch.no_grad():
        expected = wrapped.eval()(ids).logits
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)
        out = merged.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 54)
    handle.disable()
    assert handle_of(merged) is None
