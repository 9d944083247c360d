"""Training runs: they learn, continue bit for bit, survive kills and full disks, and train what
they say."""

import ast
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import train_killed
import transformers
from safetensors.torch import load_file
from tiny_model import save_tiny_model
from train_runs import DRAW, ROOT, STEPS, assert_equal, stop_at, weights

import corecontext
from corecontext import terminal
from corecontext.cli import main
from corecontext.data import corpus
from corecontext.files import UserError
from corecontext.integrations.hf.enabling import handle_of
from corecontext.train import TrainConfig, arguments, card, folder, run, trainer
from corecontext.train.checkpoint import checkpoints
from corecontext.train.run import train
from corecontext.train.train_config import load_recipe


@pytest.fixture(scope="module")
def whole(setting) -> dict[str, torch.Tensor]:
    """The weights at the end of a run that nothing disturbs."""
    train(setting)
    return weights(setting)


def test_tiny_cpu_learns_and_its_checkpoint_loads_with_cca(tmp_path, capsys, monkeypatch):
    import datasets

    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0)
    monkeypatch.setattr("corecontext.train.card._draw", DRAW)
    datasets.enable_progress_bars()
    recipe = str(ROOT / "recipes/tiny_cpu.py")
    out, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    config = load_recipe(recipe)
    assert main(["train", recipe, "--output", out, "--cache-dir", cache]) == 0
    shown = capsys.readouterr()
    rows = config.rows_per_step(1)
    title = f"training, 24 steps, each of {rows} x {config.context_length} tokens"
    assert f"{title}\n" in shown.err and f"{title}: 100 %" in shown.err
    assert "examples/s" not in shown.err, "a log has bars"
    last = shown.out.splitlines()[-1]
    assert "24 steps, loss" in last and "eval loss" in last and "epoch" not in last
    state = transformers.TrainerState.load_from_json(f"{out}/checkpoint-24/trainer_state.json")
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    assert len(losses) == 24 and losses[-1] < 0.7 * losses[0]
    model = corecontext.from_pretrained(f"{out}/model")
    assert handle_of(model).config == corecontext.CCAConfig.pooling(
        config.group_size, config.window_size
    )
    assert model.config.num_hidden_layers == 2 and model.config.use_cache
    card = Path(out, "model/README.md").read_text()
    assert "g = 16, s = 64" in card
    assert str(tmp_path) not in card
    assert Path(out, "model/loss.png").stat().st_size > 5000
    # There and back: the same weights with other settings, or none.
    assert main(["convert", f"{out}/model", str(tmp_path / "plain"), "--method", "full"]) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not hasattr(plain.config, "cca")
    command = (
        f"convert {tmp_path}/plain {tmp_path}/back --preset pooling --group-size 16 "
        "--window-size 64"
    )
    assert main(command.split()) == 0
    ids = torch.arange(20, 220)[None]
    with torch.no_grad():
        assert torch.equal(
            model.eval()(ids).logits,
            corecontext.from_pretrained(str(tmp_path / "back"))(ids).logits,
        )
        assert not torch.equal(model(ids).logits, plain(ids).logits)
    assert main(["convert", f"{out}/model", str(tmp_path / "plain")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_killed_in_a_save_and_in_a_deletion_it_continues_bit_for_bit(setting, whole, tmp_path):
    config = setting.replace(output=str(tmp_path / "run"), keep=1, eval_data=setting.data[:1])
    if torch.cuda.is_available():  # what CUDA has begun cannot be copied
        done = subprocess.run(
            [sys.executable, train_killed.__file__, repr(config)],
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        seen = ast.literal_eval(done.stdout.splitlines()[-1])
    else:
        seen = train_killed.kill_twice(config)
    assert seen == [["checkpoint-2"], ["checkpoint-4"]]
    assert any(Path(config.output).glob(".[sd]*"))  # what the kills left half done
    result = train(config)
    assert result.resumed_from == 4 and result.steps == STEPS
    assert_equal(weights(config), whole)
    assert sorted(path.name for path in Path(config.output).iterdir()) == [
        "checkpoint-6",
        "model",
        "train_config.json",
    ]
    with pytest.raises(UserError, match="already holds the finished run in model/"):
        train(config)
    # As if it had been killed before the last line of all.
    (tmp_path / "run/model").rename(tmp_path / "first")
    train(config)
    assert_equal(weights(config), whole)
    assert (tmp_path / "first/README.md").read_text() == (
        tmp_path / "run/model/README.md"
    ).read_text()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, whose sums have no order of their own"
)
def test_on_a_gpu_it_continues_bit_for_bit_where_that_is_asked_for(setting, tmp_path):
    """In half precision, whose kernels add from many programs, and rows that have many."""
    long = setting.replace(
        precision="bfloat16",
        context_length=1400,
        window_size=64,
        batch_size=2,
        steps=8,
        fuse=True,
        deterministic=True,
    )
    runs = [long.replace(output=str(tmp_path / name)) for name in ("once", "again", "stopped")]
    stop_at(5, runs[2])
    for one in runs:
        assert train(one).resumed_from == (4 if one is runs[2] else 0)
        assert_equal(weights(one), weights(runs[0]))


def test_a_fixed_order_is_asked_of_torch_for_the_run_alone(setting, tmp_path, monkeypatch):
    asked, real = [], trainer.CCATrainer.training_step

    def step(self, *args):
        asked.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            )
        )
        return real(self, *args)

    monkeypatch.setattr(trainer.CCATrainer, "training_step", step)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # what is set stays
    for wanted in (True, False):
        train(setting.replace(output=str(tmp_path / str(wanted)), steps=1, deterministic=wanted))
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    assert asked == [(True, ":16:8"), (False, ":16:8")]
    missing = (
        "histc_cuda does not have a deterministic implementation, but you set it. You can turn it "
        "off."
    )
    for told, error, shown in (
        (missing, UserError, "^deterministic must be left out for .*: histc_.* set it[.]$"),
        ("out of memory", RuntimeError, "^out of memory$"),
    ):
        monkeypatch.setattr(
            trainer.CCATrainer, "training_step", mock.Mock(side_effect=RuntimeError(told))
        )
        with pytest.raises(error, match=shown):
            train(setting.replace(output=str(tmp_path / told[:3]), deterministic=True))


@pytest.mark.usefixtures("left_streams_are_not_awaited")
def test_streamed_data_continues_bit_for_bit(setting, tmp_path, monkeypatch):
    import datasets

    hub = tmp_path / "hub"  # load_dataset takes a folder as it takes a name on the hub
    hub.mkdir()
    for i, path in enumerate(setting.data):
        text = Path(path).read_text()
        datasets.Dataset.from_list(
            [{"text": text[j : j + 90]} for j in range(0, 1500, 90)]
        ).to_parquet(hub / f"train-{i}.parquet")
    config = setting.replace(
        streaming=True,
        data=(f"hub:{hub}", setting.data[0]),
        shuffle_documents=4,
        batch_size=2,
        cache_dir=str(tmp_path / "tokens"),
        output=str(tmp_path / "whole"),
    )
    train(config)
    want, config = weights(config), config.replace(output=str(tmp_path / "run"))
    stop_at(5, config)
    documents = corpus.documents
    monkeypatch.setattr(corpus, "documents", mock.Mock(side_effect=AssertionError))
    assert train(config).resumed_from == 4  # and reads no text again
    assert_equal(weights(config), want)
    monkeypatch.setattr(corpus, "documents", documents)
    for change, message in (
        ({"long_tokens": 9, "source_field": "text"}, "long_tokens must be left out with streaming"),
        ({"context_length": 99_999}, "at least one row of 99999 tokens, got 6000 tokens"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            train(config.replace(output=str(tmp_path / "new"), **change))
    assert not (tmp_path / "new").exists()


def test_a_full_disk_loses_nothing(setting, whole, tmp_path, monkeypatch, caplog):
    config, attempts = setting.replace(output=str(tmp_path / "run")), []
    save = transformers.Trainer._save_checkpoint

    def without_room(self, *args):
        """The second save and the first two attempts of the last one may write no file of more than
        10 kB."""
        attempts.append(self.state.global_step)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if len(attempts) in (2, 3, 4):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            save(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", without_room)
    monkeypatch.setattr(run, "WAIT_S", 0)
    train(config)
    assert attempts == [2, 4, 6, 6, 6]
    assert "checkpoint-4 could not be written" in caplog.text
    assert "The last one is checkpoint-2" in caplog.text
    assert [path.name for path in checkpoints(Path(config.output))] == [
        "checkpoint-2",
        "checkpoint-6",
    ]
    assert_equal(weights(config), whole)


def test_a_run_is_continued_as_it_was_begun_and_by_one_process(setting, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "LICENSE").read_text()[:2000])
    config = setting.replace(output=str(tmp_path / "run"), data=(str(path),), steps=3, save_every=1)

    def begin_another():
        with pytest.raises(UserError, match="output '.*run' is in use by another process"):
            train(config)

    stop_at(2, config, begin_another)
    saved = tmp_path / "run/train_config.json"
    settings = saved.read_text()
    saved.write_text(settings.replace('"processes": 1', '"processes": 8'))
    with pytest.raises(
        UserError, match="holds a run of 8 processes, got 1: a step would have other rows"
    ):
        train(config)
    saved.write_text(settings)
    with (
        mock.patch.object(folder, "write_text", side_effect=OSError(28, "No space left on device")),
        pytest.raises(
            UserError, match="run' cannot be written: No space left on device. Free space"
        ),
    ):
        train(config)
    older = json.loads(settings)
    del older["config"]["streaming"], older["config"]["sink_size"]
    del older["processes"], older["rows"]
    path.write_text(path.read_text().replace("License", "licence"))
    saved.write_text(settings)
    with pytest.raises(UserError, match="on other data, or data that has changed since"):
        train(config)
    saved.write_text("{")
    with pytest.raises(
        UserError, match="must hold a run's settings in train_config.json, which cannot be read"
    ):
        train(config)
    saved.write_text(json.dumps(older))  # by an older version, which kept less
    train(config)
    (tmp_path / "file").write_text("mine")
    for output, message in (
        ("file", "must be a folder, got a file"),
        ("file/run", "must be a folder, or a place for one: Not a directory"),
    ):
        with pytest.raises(UserError, match=message):
            train(config.replace(output=str(tmp_path / output)))


def test_a_continued_run_saves_and_logs_as_often_as_it_is_told_now(setting, tmp_path):
    config = setting.replace(output=str(tmp_path / "run"), steps=5, save_every=3, log_every=4)
    stop_at(3, config)
    result = train(config.replace(save_every=1, log_every=9))
    assert [path.name for path in checkpoints(Path(config.output))] == [
        f"checkpoint-{i}" for i in (3, 4, 5)
    ]
    # A finished run has a loss, whatever log_every is.
    assert [step for step, _ in result.losses] == [5]
    assert f"{result.losses[0][1]:.4f} at step 5" in (result.model / "README.md").read_text()


def test_settings_of_generation_that_cannot_be_saved_do_no_harm(setting, tmp_path):
    config = setting.replace(
        output=str(tmp_path / "run"),
        model=save_tiny_model(tmp_path / "model"),
        steps=1,
        strategy="lora",
    )
    path = tmp_path / "model/generation_config.json"
    # As older models have, without do_sample.
    path.write_text('{"temperature": 0.9, "top_p": 0.6, "eos_token_id": 7}')
    saved = json.loads((train(config).model / "generation_config.json").read_text())
    assert saved["eos_token_id"] == 7 and "temperature" not in saved and not saved.get("do_sample")
    path.write_text('{"num_return_sequences": 3}')
    with pytest.raises(
        UserError, match="model '.*' cannot be loaded: Greedy methods .* do not support"
    ):
        train(config.replace(output=str(tmp_path / "other")))


def test_shapes_that_make_no_model_are_said(setting, tmp_path):
    for shape, strategy, message in (
        ({"hidden_size": 65}, "scratch", "shape does not make a model: The hidden size"),
        ({"hidden_size": 32}, "full", "shape must leave .* model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, "full", "shape must leave .* model.layers.2"),
    ):
        with pytest.raises(UserError, match=message):
            train(setting.replace(output=str(tmp_path / "run"), shape=shape, strategy=strategy))
    with pytest.raises(
        UserError, match="eval_data: data must hold at least one row of 96 tokens, got 9 tokens"
    ):
        (tmp_path / "short.txt").write_text("too short")
        train(
            setting.replace(output=str(tmp_path / "run"), eval_data=(str(tmp_path / "short.txt"),))
        )


@pytest.mark.parametrize(
    "method, what", [("compute_loss", "loss"), ("_clip_grad_norm", "length of the gradient")]
)
def test_a_loss_that_is_no_number_stops_with_its_rows(
    setting, whole, tmp_path, monkeypatch, method, what
):
    config = setting.replace(output=str(tmp_path / "run"), save_every=1)
    original = getattr(transformers.Trainer, method)

    def poisoned(self, *args, **kwargs):
        value = original(self, *args, **kwargs)
        return value * float("nan") if self.state.global_step == 2 else value

    monkeypatch.setattr(transformers.Trainer, method, poisoned)
    with pytest.raises(UserError) as error:
        train(config)
    message = str(error.value)
    assert f"the {what} of step 3 must be finite, got nan" in message
    assert "last checkpoint is checkpoint-2" in message
    assert ("text" in message and "tokens 0 to" in message) or "tokens" in message
    assert_equal(weights(config, "checkpoint-2"), weights(setting, "checkpoint-2"))
    monkeypatch.undo()
    assert train(config).resumed_from == 2  # and with the cause away it goes on
    assert_equal(weights(config), whole)


@pytest.mark.parametrize(
    "strategy, changes, trained",
    [
        ("partial", {"rope_theta": 5e5}, ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        (
            "lora",
            {"lora_rank": 2, "lora_targets": ("q_proj", "down_proj"), "accumulation": 2},
            ("q_proj.weight", "down_proj.weight"),
        ),
        ("full", {"precision": "bfloat16", "checkpointing": False}, ("",)),
        (
            "partial",
            {"distil": 1.0, "rope_theta": 5e5, "precision": "bfloat16"},
            ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        ),
        (
            "lora",
            {"distil": 0.5, "lora_targets": ("q_proj",), "lora_rank": 2, "accumulation": 2},
            ("q_proj.weight",),
        ),
        ("full", {"distil": 0.5, "precision": "bfloat16"}, ("",)),
    ],
)
def test_strategies_train_only_what_they_say(setting, tmp_path, strategy, changes, trained):
    config = setting.replace(
        output=str(tmp_path / "run"),
        strategy=strategy,
        steps=2,
        eval_data=setting.data[:1],
        **changes,
    )
    result = train(config)
    before, after = load_file(Path(config.model) / "model.safetensors"), weights(config)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith(trained)}
    if strategy == "lora":
        ranks = {
            torch.linalg.matrix_rank(after[name] - before[name], atol=1e-5).item()
            for name in changed
        }
        assert ranks <= {1, 2}
    settings = transformers.AutoConfig.from_pretrained(result.model)
    assert settings.rope_parameters["rope_theta"] == (config.rope_theta or 10_000.0)
    assert settings.cca["group_size"] == 4 and not list(result.model.glob("adapter*"))
    assert 3 < result.metrics["eval_loss"] < 7


def test_a_context_is_extended_and_a_folder_is_one_runs_only(setting, whole, tmp_path):
    from corecontext.train.student import prepare_config

    hf_config = prepare_config(setting.replace(context_length=20_000, rope_theta=1e6))
    assert (hf_config.max_position_embeddings, hf_config.rope_parameters["rope_theta"]) == (
        20_000,
        1e6,
    )
    (tmp_path / "mine.txt").write_text("mine")
    for change, message in (
        ({"output": ""}, "output must be given"),
        ({"model": ""}, "model must be given"),
        ({"output": str(tmp_path)}, "must be a new or empty folder, or a run's"),
        ({"output": setting.output, "steps": 7}, "other settings: steps was 6, got 7"),
        ({"fsdp": True}, "fsdp needs several processes with a GPU each"),
        ({"context_parallel": 2}, "context_parallel must divide the number of processes 1, got 2"),
        ({"long_tokens": 9}, "source_field must be given with long_tokens"),
        (
            {"distil": 0.5, "context_length": 9999},
            "context_length must be at most the model's 8192 "
            "tokens with distil 0.5, got 9999: it cannot teach beyond them",
        ),
        ({"output": setting.output, "distil": 0.5}, "other settings: distil was 0.0, got 0.5"),
        ({"shape": {"heads": 3}}, "shape must name settings of llama, got 'heads'"),
        ({"context_length": 9999}, "must hold at least one row of 9999 tokens, got 4500 tokens"),
        ({"data": ()}, "data must name at least one file"),
    ):
        with pytest.raises(UserError, match=message):
            train(setting.replace(**{"output": str(tmp_path / "new"), **change}))
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_run_is_reported(setting, tmp_path, monkeypatch):
    config = setting.replace(steps=1)
    reports = ("tensorboard",) if importlib.util.find_spec("tensorboard") else ()
    train(config.replace(report_to=reports, output=str(tmp_path / "again")))
    assert len(list((tmp_path / "again").glob("runs/*/events*"))) == len(reports)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name)
    )
    with pytest.raises(UserError, match="report_to 'wandb' needs the package wandb. Install it"):
        train(config.replace(report_to=("wandb",)))
    with pytest.raises(ValueError, match="report_to must be one of 'tensorboard', 'wandb'"):
        config.replace(report_to=("numpy",))


def test_cards_name_data_of_the_hub_in_full(tmp_path):
    (tmp_path / "secret").mkdir()
    config = TrainConfig(
        model="me/model",
        output="run",
        data=(f"hub:{tmp_path}/secret", f"{tmp_path}/a.txt", "hub:some/set@main:part:train"),
    )
    card.write(tmp_path, config, [{"step": 1, "loss": 2.0}], {}, 5)
    text = (tmp_path / "README.md").read_text()
    assert "`secret`, `a.txt`, `hub:some/set@main:part:train`" in text and str(tmp_path) not in text
    assert "\ndatasets:\n- some/set\n" in text


def test_fsdp_sums_gradients_split_and_in_float32(setting, monkeypatch):
    given = {}
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "transformers.TrainingArguments",
        lambda **options: (
            given.update(options),
            SimpleNamespace(
                device=torch.device("cuda"),
                n_gpu=8,
                bf16=options["bf16"],
                fsdp_plugin_args={},
            ),
        )[1],
    )
    made = arguments.arguments_of(setting.replace(fsdp=True, accumulation=8, precision="auto"))
    assert made._n_gpu == 1  # Trainer splits no batch over this process's other GPUs
    assert given["accelerator_config"]["gradient_accumulation_kwargs"] == {"sync_each_batch": True}
    policy = made.fsdp_plugin_args["mixed_precision_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.output_dtype is None  # else the loss is rounded
    assert not arguments.arguments_of(setting.replace(fsdp=True)).fsdp_plugin_args


def test_processes_wait_for_the_one_that_tokenises_without_a_collective(monkeypatch):
    """A process group gives up collectives after half an hour; a store waits for as long as it is
    told."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "barrier", mock.Mock(side_effect=AssertionError))
    done = []

    def process(rank):
        for turn in range(2):
            arguments = SimpleNamespace(
                world_size=4, process_index=2 + rank, local_process_index=rank
            )
            with run._local_rank_0_first(arguments):
                time.sleep(0 if rank else 0.1)
                done.append((turn, rank))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(process, (1, 0), timeout=200))
    assert (
        [rank for turn, rank in done if turn == 0]
        == [rank for turn, rank in done if turn == 1]
        == [0, 1]
    )


def test_a_full_disk_keeps_no_process_from_what_all_gather(setting, tmp_path, monkeypatch):
    """Under FSDP the process that writes takes part in the gathering of all parts, whichever it
    could not write."""
    gathered = []

    def no_room(*args, **kwargs):
        gathered.append(kwargs)
        raise OSError(28, "No space left on device")

    def no_weights(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "save_fsdp_model", no_room)
    monkeypatch.setattr(trainer, "save_fsdp_optimizer", lambda *args: gathered.append("optimizer"))
    monkeypatch.setattr(transformers.Trainer, "save_model", no_weights)
    one = trainer.CCATrainer(
        torch.nn.Linear(2, 2), transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    )
    one.is_fsdp_enabled = True
    one.accelerator.state.fsdp_plugin = None
    one.lr_scheduler = mock.Mock()
    with mock.patch.object(torch, "save"), pytest.raises(OSError, match="No space left"):
        one.save_checkpoint()
    assert gathered == [{"adapter_only": True}, "optimizer"]
    assert "No space left" in str(one.save_error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_parts_train_alike(setting, whole, tmp_path, compile_by, backend):
    compile_by(backend)
    config = setting.replace(output=str(tmp_path / "fused"), fuse=True)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > counted
    fused = weights(config)
    assert fused.keys() == whole.keys()
    for key, value in whole.items():
        torch.testing.assert_close(fused[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method, distil", [("full", 0.0), ("window", 0.0), ("window", 0.5)])
def test_rivals_train_too(setting, tmp_path, method, distil):
    config = setting.replace(output=str(tmp_path / "run"), method=method, steps=2, distil=distil)
    train(config)
    assert not hasattr(
        transformers.AutoConfig.from_pretrained(Path(config.output) / "model"), "cca"
    )
