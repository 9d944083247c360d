"""The pieces of a training run one by one: the loss, the model that learns, the teacher, Trainer's
overrides, and which rows a run reads."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import tiny_model, tokens
from safetensors.torch import load_file
from tiny_model import save_tiny_model

pytest.importorskip("accelerate", reason="Trainer needs accelerate")
datasets = pytest.importorskip("datasets", reason="training reads its data with datasets")

from transformers import LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from corecontext import CCAConfig, baselines  # noqa: E402
from corecontext.config import PAPER_RULE, PRESETS  # noqa: E402
from corecontext.data.packing import IGNORED, collate, run_order, shuffled, upsampled  # noqa: E402
from corecontext.files import UserError  # noqa: E402
from corecontext.train import TrainConfig, conversion, run, student  # noqa: E402
from corecontext.train import loss as loss_module  # noqa: E402
from corecontext.train import trainer as trainer_module  # noqa: E402
from corecontext.train.loss import chunked_cross_entropy, compute_loss_in_chunks  # noqa: E402
from corecontext.train.student import (  # noqa: E402
    best_settings,
    extend_context,
    make_model,
    make_tokenizer,
    prepare_config,
    saved_settings,
)
from corecontext.train.teacher import Teacher, load_teacher  # noqa: E402
from corecontext.train.train_config import SCHEDULE  # noqa: E402
from corecontext.train.trainer import CCATrainer, _document_bounds  # noqa: E402

# The loss


@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True)])
def test_gradients_of_the_loss_are_scaled_by_that_of_its_result(learns):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 8, generator=generator).requires_grad_(flag)
        for rows, flag in zip((11, 20), learns)
    )
    labels = torch.randint(0, 20, (11,), generator=generator)
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    loss = chunked_cross_entropy(hidden, weight, labels, 11, 4)
    wanted = F.cross_entropy(F.linear(hidden, weight), labels)
    for got, want in zip(
        torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(wanted, leaves)
    ):
        torch.testing.assert_close(got, 3 * want)


def test_the_heads_gradient_is_summed_in_float32():
    """In bfloat16 a sum of 300 equal numbers stops at 256 of them."""
    hidden = torch.ones(300, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.zeros(300, dtype=torch.long), 1, 1)
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad.dtype == torch.bfloat16 and grad.flatten().tolist() == [-150.0, 150.0]


def test_logits_have_the_dtype_of_the_arithmetic(monkeypatch):
    model, ids, seen = tiny_model(), tokens(1, 12), []
    real = loss_module._chunk_loss
    monkeypatch.setattr(
        loss_module,
        "_chunk_loss",
        lambda hidden, matrix, *rest: (
            seen.append((hidden.dtype, matrix.dtype, len(hidden))),
            real(hidden, matrix, *rest),
        )[1],
    )
    compute_loss_in_chunks(model, 8)
    model(ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids)
    whole, half = torch.float32, torch.bfloat16
    assert seen == [(whole, whole, 8), (whole, whole, 4), (half, half, 8), (half, half, 4)]


def test_a_loss_that_is_not_in_chunks_gets_every_argument():
    model, ids = tiny_model(), tokens(1, 12)
    model.lm_head = torch.nn.Linear(48, 96)
    wanted = model(ids, labels=ids, num_items_in_batch=torch.tensor(5)).loss
    compute_loss_in_chunks(model, 8)
    got = model(ids, labels=ids, num_items_in_batch=torch.tensor(5))
    assert torch.equal(got.loss, wanted) and got.logits is not None
    shifted = F.pad(ids, (0, 1), value=IGNORED)[:, 1:]
    got = model(ids, labels=ids, shift_labels=shifted.flip(1)).loss
    assert not torch.equal(got, model(ids, labels=ids).loss)  # shifted labels count


# The model that learns


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A checkpoint whose weights bfloat16 cannot hold."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def made(config, **options):
    """A run's model."""
    return make_model(config, prepare_config(config), bfloat16=True, **options)


def test_what_learns_begins_with_the_checkpoints_own_weights(tiny):
    saved = load_file(f"{tiny}/model.safetensors")
    config = TrainConfig(model=tiny, group_size=4, window_size=8)
    model = made(config)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, saved[name]), name
    assert not model.config.use_cache
    lora = made(
        config.replace(strategy="lora", lora_rank=3, lora_alpha=5.0, lora_targets=("q_proj",))
    )
    settings = lora.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (3, 5.0, 0.0)
    assert settings.bias == "none"
    learns = {name: p.dtype for name, p in lora.named_parameters() if p.requires_grad}
    assert len(learns) == 4 and set(learns.values()) == {torch.float32}
    assert all(".q_proj.lora_" in name for name in learns)
    assert lora.base_model.model.lm_head.weight.dtype == torch.bfloat16


def test_random_weights_follow_from_the_seed(tiny):
    config = TrainConfig(model=tiny, strategy="scratch", shape={"num_hidden_layers": 1})
    first, again, other = (made(config.replace(seed=seed)).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.dtype == torch.float32


def test_a_rival_has_the_runs_window(tiny):
    config = TrainConfig(model=tiny, method="window", window_size=7)
    assert baselines.rival_of(made(config)).method.window_size == 7


@pytest.mark.parametrize(
    "change, limit",
    [({"context_length": 8192}, None), ({"context_length": 8193}, 8192), ({"distil": 0.0}, None)],
)
def test_a_model_teaches_as_far_as_it_was_built(tiny, change, limit):
    config = TrainConfig(**{"model": tiny, "distil": 0.5, "context_length": 8193, **change})
    if limit is None:
        assert prepare_config(config).max_position_embeddings == max(8192, config.context_length)
        return
    with pytest.raises(UserError, match=f"at most the model's {limit} tokens with distil 0.5, got"):
        prepare_config(config)


def test_a_config_is_changed_for_the_run_alone(tiny, tmp_path):
    content = json.loads(Path(tiny, "config.json").read_text())
    content |= {"attention_dropout": 0.1, "cca": {"group_size": 4, "learned": []}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = TrainConfig(model=str(tmp_path), context_length=64)
    changed = prepare_config(config)
    assert changed.attention_dropout == 0 and changed.cca["group_size"] == 4
    assert changed.max_position_embeddings == 8192  # a model of longer rows stays one
    for other in ({"method": "full"}, {"strategy": "scratch"}):
        assert not hasattr(prepare_config(config.replace(**other)), "cca")


def test_a_new_base_is_that_of_full_attention_without_a_scaling():
    def config(**parameters):
        return SimpleNamespace(rope_parameters=parameters, max_position_embeddings=None)

    plain = config(rope_type="default", rope_theta=1e4)
    extend_context(plain, 5e5, 100)
    assert plain.rope_parameters["rope_theta"] == 5e5 and plain.max_position_embeddings == 100
    nested = config(full_attention={"rope_theta": 1e4}, sliding_attention={"rope_theta": 1e4})
    extend_context(nested, 5e5, 100)
    assert nested.rope_parameters == {
        "full_attention": {"rope_theta": 5e5},
        "sliding_attention": {"rope_theta": 1e4},
    }
    scaled = config(rope_type="yarn", rope_theta=1e4)
    extend_context(scaled, None, 100)
    with pytest.raises(UserError, match="left alone for a model with rope type 'yarn', whose"):
        extend_context(scaled, 5e5, 100)


def test_a_tokenizer_has_no_more_entries_than_the_model(tiny):
    config = TrainConfig(model=tiny)
    assert len(make_tokenizer(config, SimpleNamespace(vocab_size=256))) == 256
    with pytest.raises(UserError, match="at most the model's 255 entries, got 256"):
        make_tokenizer(config, SimpleNamespace(vocab_size=255))


FETCH = PRESETS["default"].settings
POOLING = PRESETS["pooling"].settings


@pytest.mark.parametrize(
    "changes, given, names",
    [
        ({}, (), {*FETCH, "distil"}),
        ({}, ("distil",), {*FETCH}),
        ({"fetch_groups": 3}, ("fetch_groups",), {*FETCH, "distil"} - {"fetch_groups"}),
        ({"fetch_groups": 0}, ("fetch_groups",), {*FETCH, "distil"} - {"fetch_groups"}),
        ({"group_size": 8}, ("group_size",), {*FETCH, "distil"} - {"group_size"}),
        ({"window_size": 64}, ("window_size",), {*FETCH, "distil"} - {"window_size"}),
        ({"context_parallel": 2}, (), {*FETCH}),
        ({"strategy": "scratch"}, (), {*FETCH}),
        ({"context_length": 8192}, ("context_length",), {*FETCH, "distil"}),
        ({"context_length": 8193}, ("context_length",), {*FETCH}),
        ({"layer_group_sizes": (4, 4)}, ("layer_group_sizes",), {*FETCH, "distil"}),
        ({"method": "full"}, (), {"window_size", "fetch_groups"}),
        ({"model": ""}, (), set()),
    ],
)
def test_the_best_settings_are_those_that_a_run_can_have(tiny, changes, given, names):
    config = TrainConfig(**{"model": tiny, **changes})
    best = best_settings(config, given)
    chosen = {name: value for name, value in best.items() if name not in SCHEDULE}
    has_no_fetch = {"context_parallel", "strategy", "method"} & changes.keys()
    is_pooling = has_no_fetch or not config.fetch_groups
    recipe = {"distil": 0.5, **(POOLING if is_pooling else FETCH)}
    assert chosen == {name: recipe[name] for name in names}
    config.replace(**best)


# The teacher


def test_a_teacher_reads_each_row_by_its_own_documents(tiny, tmp_path):
    model, ids = tiny_model("gemma2"), tokens(2, 20)
    edges = ((0, 20), (0, 3, 4, 20))
    positions = torch.stack(
        [torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in edges]
    )
    teacher = Teacher(model, 0.25)
    taught = teacher(ids, positions, unused=None)
    with torch.no_grad():
        wanted = [
            model.base_model(ids[i : i + 1, a:b]).last_hidden_state[0]
            for i, row in enumerate(edges)
            for a, b in pairwise(row)
        ]
    torch.testing.assert_close(taught.hidden, torch.cat(wanted))
    assert (taught.share, taught.softcap) == (0.25, model.config.final_logit_softcapping)
    assert taught.softcap and torch.equal(taught.weight, model.get_output_embeddings().weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert teacher(ids, positions).hidden.dtype == torch.float32
    config = TrainConfig(model=tiny, distil=0.5)
    half = load_teacher(config, bfloat16=True, device=torch.device("cpu"))
    assert half.share == 0.5 and {p.dtype for p in half.model.parameters()} == {torch.bfloat16}


# Trainer's overrides


def fake_trainer(**attributes):
    """A trainer without a model, whose parts are its arguments."""
    trainer = mock.Mock(spec=CCATrainer)
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, row):
        return {"input_ids": torch.tensor([row]), "row": row}


@pytest.mark.parametrize("seed", [0, 5])
def test_batches_come_in_the_order_of_the_run(seed, tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    settings = TrainingArguments(str(tmp_path), use_cpu=True, seed=seed, **options)
    trainer = CCATrainer(
        torch.nn.Linear(2, 2), settings, train_dataset=_Rows(), data_collator=collate
    )
    batches = list(trainer.get_train_dataloader())
    order = run_order(7, 12, seed)
    assert [batch["row"] for batch in batches] == [order[i : i + 2] for i in range(0, 12, 2)]
    assert [batch["input_ids"].flatten().tolist() for batch in batches] == [
        batch["row"] for batch in batches
    ]


def test_ranks_that_share_rows_count_them_once():
    settings = SimpleNamespace(world_size=8, train_batch_size=3, gradient_accumulation_steps=5)
    for context_parallel, rows in ((1, 120), (2, 60), (8, 15)):
        trainer = fake_trainer(args=settings, context_parallel=context_parallel)
        assert CCATrainer._rows_per_step(trainer) == rows
        trainer = CCATrainer.__new__(CCATrainer)
        trainer.context_parallel = context_parallel
        for count in (80, None):
            with mock.patch.object(Trainer, "get_batch_samples", lambda *_: ([1], count)):
                got = trainer.get_batch_samples(None, 1)
            assert got == ([1], count and 80 // context_parallel)


def test_the_log_has_the_means_of_a_distilled_runs_parts():
    """Each backward pass gives its share of a step's cross-entropy, and each process its own."""
    trainer = CCATrainer.__new__(CCATrainer)
    trainer.distil = 0.25
    trainer._cross_entropies = []
    trainer.args = SimpleNamespace(gradient_accumulation_steps=2)
    reduced = []
    trainer.accelerator = SimpleNamespace(
        num_processes=4, reduce=lambda x, how: (reduced.append(how), x)[1]
    )
    parts = iter((0.25, 0.5, 0.75, 1.0))

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        assert return_outputs
        return torch.tensor(7.0), {"cross_entropy": torch.tensor(next(parts))}

    logged = []
    with (
        mock.patch.object(Trainer, "compute_loss", compute_loss),
        mock.patch.object(Trainer, "log", lambda self, logs, start: logged.append(logs)),
    ):
        for _ in range(4):  # two steps of two passes, an entry for both
            assert trainer.compute_loss(None, {}) == 7.0
        trainer.log({"eval_loss": 1.0})
        trainer.log({"loss": 3.0})
    assert logged[0] == {"eval_loss": 1.0} and reduced == ["mean"]
    assert logged[1] == {"loss": 3.0, "cross_entropy": 5.0, "divergence": (3 - 0.75 * 5) / 0.25}
    assert trainer._cross_entropies == []


def test_a_number_that_is_not_finite_is_said_with_the_rows_of_this_step(tmp_path):
    trainer = CCATrainer.__new__(CCATrainer)
    trainer.args = SimpleNamespace(train_batch_size=2, output_dir=str(tmp_path))
    trainer.state = SimpleNamespace(global_step=6)
    trainer.train_dataset = SimpleNamespace(describe=lambda row: f"place {row}")
    trainer.wire, trainer._rows = None, []
    trainer.on_rows = mock.Mock()

    def step(*rows, loss=1.0):
        for first in range(0, len(rows), 2):
            with mock.patch.object(Trainer, "training_step", lambda *_: torch.tensor(loss)):
                trainer.training_step(None, {"row": list(rows[first : first + 2])})

    def norm(value):
        with mock.patch.object(Trainer, "_get_grad_norm", lambda *_: value):
            return trainer._get_grad_norm(None)

    step(1, 2, 3, 4)
    assert norm(2.5) == 2.5
    step(5, 6)
    with pytest.raises(UserError) as error:
        step(7, 8, loss=float("inf"))
    assert str(error.value).startswith(
        "the loss of step 7 must be finite, got inf, from rows 7, 8 (row 7: place 7; row 8: place "
        "8). Training stopped before this step could be kept; the last checkpoint is none."
    )
    norm(1.0)  # the optimizer step forgets its rows
    step(1, 2, 3, 4, 5, 6)
    with pytest.raises(UserError) as error:
        norm(torch.tensor(float("nan")))
    assert str(error.value).startswith(
        "the length of the gradient of step 7 must be finite, got nan, from rows 1, 2, 3, 4, 5, 6 "
        "(row 1: place 1; row 2: place 2; row 3: place 3; row 4: place 4). Training"
    )


@pytest.mark.parametrize(
    "positions, bounds",
    [
        ([0, 1, 2, 3], ()),
        ([0, 1, 0, 1], (0, 2, 4)),
        ([0, 0, 0, 1], (0, 1, 2, 4)),  # documents of a single token
        ([0, 1, 2, 0], (0, 3, 4)),
        ([0], ()),
    ],
)
def test_documents_of_a_row_begin_where_positions_restart(positions, bounds):
    assert _document_bounds(torch.tensor([positions])) == bounds
    with pytest.raises(UserError, match="batch_size must be 1 with context parallelism, got 2"):
        _document_bounds(torch.tensor([positions, positions]))


@pytest.mark.parametrize("rank, neighbours", [(0, [0, 1, 2]), (2, [0, 1, 2]), (4, [3, 4, 5])])
def test_neighbours_share_rows(rank, neighbours):
    made = []

    def new_group(ranks):
        made.append(ranks)
        return SimpleNamespace(ranks=ranks, rank=lambda: 0, size=lambda: len(ranks))

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "get_rank", lambda: rank),
    ):
        assert trainer_module._wire(3, 6).group.ranks == neighbours
        assert made == [[0, 1, 2], [3, 4, 5]]  # all ranks make all groups
        with pytest.raises(UserError, match="divide the number of processes 6, got 4"):
            trainer_module._wire(4, 6)


@pytest.mark.parametrize("mine, theirs", [(True, True), (True, False), (False, True)])
def test_all_ranks_write_or_none(mine, theirs):
    def all_reduce(flag, operation=dist.ReduceOp.SUM):
        combine = {dist.ReduceOp.MIN: min, dist.ReduceOp.MAX: max, dist.ReduceOp.SUM: sum}
        flag.fill_(combine[operation]((float(flag), float(theirs))))

    for world in (1, 2):
        trainer = fake_trainer(args=SimpleNamespace(world_size=world, device="cpu"))
        with mock.patch.object(dist, "all_reduce", all_reduce):
            wanted = mine if world == 1 else mine and theirs
            assert CCATrainer._on_all_ranks(trainer, mine) == wanted


def test_a_bug_in_saving_is_no_full_disk(tmp_path, monkeypatch, caplog):
    settings = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = CCATrainer(torch.nn.Linear(2, 2), settings)
    trainer.state.global_step = 3
    save = mock.Mock(side_effect=[OSError(28, "No space left"), ValueError("a bug")])
    monkeypatch.setattr(Trainer, "_save_checkpoint", save)
    (tmp_path / "checkpoint-2").mkdir()
    trainer._save_checkpoint(None, None)
    assert isinstance(trainer.save_error, OSError) and trainer.args.output_dir == str(tmp_path)
    assert "checkpoint-3 could not be written: [Errno 28] No space left. The last one is" in (
        caplog.text
    )
    assert "is checkpoint-2; training goes on" in caplog.text
    with pytest.raises(ValueError, match="a bug"):
        trainer._save_checkpoint(None, None)
    assert trainer.args.output_dir == str(tmp_path)


def test_packages_of_training_and_of_every_report_are_asked_for(monkeypatch):
    missing = set()
    monkeypatch.setattr(
        run.importlib.util, "find_spec", lambda name: None if name in missing else name
    )
    config = TrainConfig(report_to=("tensorboard", "wandb"))
    run._check_packages(config)
    for name in ("accelerate", "datasets", "matplotlib", "tensorboard", "wandb"):
        missing.add(name)
        with pytest.raises(UserError, match=f"needs the package {name}. Install"):
            run._check_packages(config)
        missing.remove(name)


# The rows of a run


@pytest.fixture
def documents():
    lengths = [4, 40, 5, 6, 7, 30, 5, 6, 4, 5]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[i] * n for i, n in enumerate(lengths)],
            "length": lengths,
            "source": ["a", "b"] * 5,
            "origin": [f"f:{i}" for i in range(10)],
        }
    )


def test_a_run_reads_its_rows_as_its_settings_say(documents, monkeypatch):
    asked = []
    monkeypatch.setattr(
        run, "read_corpus", lambda names, tokenizer, **o: (asked.append((names, o)), documents)[1]
    )
    config = TrainConfig(
        data=("d",), eval_data=("e",), context_length=8, seed=3, workers=5, cache_dir="c"
    )
    config = config.replace(text_field="t", source_field="s")
    assert run._read_rows(config, None, 1).order.tolist() == shuffled(10, 3).tolist()
    mixed = config.replace(long_tokens=8, long_share=0.25)
    lengths = np.asarray(documents["length"])
    wanted = upsampled(lengths, documents["source"][:], 8, 0.25, 3)
    assert run._read_rows(mixed, None, 1).order.tolist() == wanted.tolist()
    assert run._read_eval_rows(config, None).order.tolist() == list(range(10))
    assert run._read_eval_rows(config.replace(eval_data=()), None) is None
    options = {"text_field": "t", "workers": 5, "cache_dir": "c"}
    whole = (("d",), {**options, "source_field": "s"})
    assert asked == [whole, whole, (("e",), {**options, "source_field": None})]


def test_writing_is_tried_again_for_as_long_as_patience_lasts(monkeypatch, caplog):
    clock, waited = [100.0], []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        run.time, "sleep", lambda s: (waited.append(s), clock.__setitem__(0, clock[0] + s))
    )
    write = mock.Mock(side_effect=[OSError(28, "No space left"), OSError(28, "No space left"), 5])
    assert run._retry_writing(write, Path("out")) == 5 and waited == [10, 10]
    assert "No space left; trying again in 10 s: free space in out" in caplog.text
    write = mock.Mock(side_effect=OSError(28, "No space left"))
    with pytest.raises(UserError, match="All checkpoints are kept: free space and run the same"):
        run._retry_writing(write, Path("out"))
    assert write.call_count == 3600 // 10 + 2
    write = mock.Mock(side_effect=ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        run._retry_writing(write, Path("out"))
    assert write.call_count == 1


def test_a_copy_of_a_checkpoint_is_whole_or_absent(tiny, tmp_path, monkeypatch):
    (tmp_path / ".new.partial").mkdir()  # of an interrupted copy
    (tmp_path / ".new.partial/stale").write_text("s")
    with pytest.raises(UserError, match="must be a folder with config.json, got none"):
        conversion.convert(str(tmp_path), str(tmp_path / "new"), None)
    settings = TrainConfig(group_size=4, window_size=9).cca()
    conversion.convert(tiny, str(tmp_path / "new"), settings)
    assert not (tmp_path / "new/stale").exists()
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config.pop("cca") == json.loads(json.dumps(settings.to_dict()))
    conversion.convert(str(tmp_path / "new"), str(tmp_path / "plain"), None)
    assert json.loads((tmp_path / "plain/config.json").read_text()) == config
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(conversion, "write_text", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        conversion.convert(tiny, str(tmp_path / "other"), settings)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "plain"}


def test_a_given_group_size_is_that_of_every_layer(tiny, tmp_path):
    config = json.loads(Path(tiny, "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["cca"] = CCAConfig.paper(4, 8, layer_group_sizes=(2,) * layers).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = TrainConfig(model=str(tmp_path), group_size=8)
    saved = saved_settings(run, ())
    assert saved.pop("layer_group_sizes") == (2,) * layers
    assert saved_settings(run, {"group_size"}) == saved


@pytest.mark.parametrize("damage", ["missing", "short", "index"])
def test_half_a_checkpoint_is_not_copied(tiny, tmp_path, damage):
    shards = tmp_path / "shards"
    LlamaForCausalLM.from_pretrained(tiny).save_pretrained(shards, max_shard_size="50KB")
    conversion.convert(str(shards), str(tmp_path / "whole"), None)
    weights = sorted(shards.glob("*.safetensors"))[1]
    if damage == "index":  # of weights in another form
        weights = tmp_path / "model-1.bin"
        index = {"weight_map": {"lm_head.weight": weights.name}}
        (shards / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"must hold .*weights.*{weights.name}|{weights.name}'"):
        conversion.convert(str(shards), str(tmp_path / "new"), None)
    assert not (tmp_path / "new").exists()


# The finished model


@pytest.mark.parametrize(
    "groups, kept",
    [
        (4, {"fetch_slots": 6, "prefill": "fetch"}),
        (7, {"prefill": "fetch"}),
        (0, {"fetch_slots": 6, "prefill": "fetch"}),
    ],
)
def test_settings_of_a_cache_outlast_the_training_where_they_suit(groups, kept):
    saved = {"cache_dtype": "int8", "fetch_slots": 6, "prefill": "fetch", "window_size": 99}
    cca = TrainConfig(fetch_groups=groups, store="host", window_size=8).cca()
    result = student._with_cache_settings(cca, saved)
    assert result == cca.replace(cache_dtype="int8", **kept)
    # Prompts are read by each token's choice only where the checkpoint says so.
    for unsaid in ({}, {"prefill": "auto"}, PAPER_RULE):
        assert student._with_cache_settings(cca, unsaid).prefill == cca.prefill == "auto"


def test_frozen_weights_of_the_finished_model_are_the_originals(tiny, tmp_path):
    """All were rounded for the training; those that learned keep what they have."""
    original = load_file(f"{tiny}/model.safetensors")
    config = TrainConfig(model=tiny, strategy="partial", group_size=4, window_size=8)
    model = made(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    model.save_pretrained(tmp_path / "saved")
    student.export(config, tmp_path / "saved", tmp_path / "target", torch.float32)
    exported = load_file(tmp_path / "target/model.safetensors")
    for name, tensor in original.items():
        learned = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
        wanted = tensor.bfloat16().float() + 1 if learned else tensor
        assert torch.equal(exported[name], wanted), name
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["use_cache"] and config["cca"]["window_size"] == 8
