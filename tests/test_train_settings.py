"""The settings of a training run: their bounds, the command's options, the folder that keeps them,
Trainer's arguments, and the card that shows them."""

import functools
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import SafetensorError
from tiny_model import save_tiny_model

pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytest.importorskip("datasets", reason="training reads its data with datasets")

from corecontext.cli import main
from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.train import TrainConfig, arguments, card, folder, memory_fit, run
from corecontext.train.checkpoint import is_write_failure
from corecontext.train.train_config import load_recipe

# Bounds


@pytest.mark.parametrize(
    "name, least",
    [
        *((name, 1) for name in ("steps", "batch_size", "accumulation", "workers")),
        *((name, 1) for name in ("context_parallel", "lora_rank", "loss_chunk", "long_tokens")),
        *((name, 1) for name in ("shuffle_documents", "save_every", "keep", "log_every")),
        *((name, 0) for name in ("warmup_steps", "eval_every")),
        ("context_length", 2),
    ],
)
def test_whole_numbers_have_a_least_value(name, least):
    assert getattr(TrainConfig(**{name: least}), name) == least
    with pytest.raises(ValueError, match=f"^{name} must be at least {least}, got {least - 1}"):
        TrainConfig(**{name: least - 1})
    for wrong in (least + 0.5, True):
        with pytest.raises(TypeError, match=f"^{name} must be an integer"):
            TrainConfig(**{name: wrong})


@pytest.mark.parametrize(
    "name, allowed, refused",
    [
        ("learning_rate", (0, 1.0), (-1e-9, math.inf, math.nan, "1", True)),
        ("min_learning_rate", (0.0, 2e-5), (-1e-9, 2.1e-5, True)),
        ("weight_decay", (0.0, 3.0), (-1e-9, math.inf, None)),
        ("max_grad_norm", (0.0, 3.0), (-1e-9, math.inf, None)),
        ("beta2", (0.0, 0.999), (-1e-9, 1.0)),
        ("distil", (0.0, 1.0), (-1e-9, 1.001)),
        ("long_share", (1e-9, 0.999), (0, 1)),
        ("rope_theta", (None, 1.1), (1.0, math.inf, math.nan)),
        ("seed", (0, 2**32 - 1), (-1, 2**32, 1.0)),
        ("precision", ("auto", "float32", "bfloat16"), ("float16",)),
        ("strategy", ("scratch", "full", "partial", "lora"), ("all",)),
        ("report_to", ((), ("tensorboard", "wandb")), (("wandb", "mlflow"),)),
    ],
)
def test_other_values_have_bounds_too(name, allowed, refused):
    for value in allowed:
        assert getattr(TrainConfig(**{name: value}), name) == value
    for value in refused:
        with pytest.raises((ValueError, TypeError), match=rf"^{name} must (be|lie)"):
            TrainConfig(**{name: value})


def test_settings_that_exclude_each_other_are_refused_in_both_forms():
    for settings in (
        {"method": "window", "layer_group_sizes": (4,)},
        {"streaming": True, "long_tokens": 5},
    ):
        with pytest.raises(ValueError, match="must be left out"):
            TrainConfig(**settings)
        for name in settings:
            if name != "method":
                TrainConfig(**{name: settings[name]})


REFUSED_RECIPES = {
    "list.json": ("[]", "must hold a TrainConfig: got a list"),
    "broken.json": ("{", "must hold a TrainConfig: Expecting"),
    "word.json": ('{"stepz": 3}', "unknown recipe key 'stepz'. Did you mean 'steps'?"),
    "shape.json": ('{"shape": 64}', 'shape must be a JSON object, as {"hidden_size": 64}, got 64.'),
    "shared.json": (
        '{"context_parallel": 2, "method": "window"}',
        "context_parallel must be 1, got 2, but for method 'cca'",
    ),
    "sort.py": ("def sort(): return {}", "must return a TrainConfig, got dict."),
    "lost.py": (
        "def _lost(): pass\ndef b(): pass\ndef a(): pass",
        "must have a function 'lost', got a, b. Give FILE.py:FUNCTION.",
    ),
    "empty.py:f": ("f = 3", "must have a function 'f', got none."),
    "zero.py": ("def zero():\n    return 1 / 0", ", line 2: ZeroDivisionError: division by zero"),
    "bound.py": (
        "from corecontext.train import TrainConfig as T\ndef bound(): return T(steps=0)",
        ", line 2: steps must be at least 1, got 0",
    ),
    "none.py": (None, "does not exist. Give fetch, paper, FILE.py:FUNCTION, "),
}


@pytest.mark.parametrize("name", REFUSED_RECIPES)
def test_a_recipe_that_is_none_is_refused_by_its_name(name, tmp_path):
    text, words = REFUSED_RECIPES[name]
    path = tmp_path / name.partition(":")[0]
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as refusal:
        load_recipe(f"{tmp_path}/{name}")
    assert str(refusal.value).startswith(f"recipe '{path}'")
    assert words in str(refusal.value)


def test_a_recipe_is_a_function_of_a_file(tmp_path):
    text = "from corecontext.train import TrainConfig\n"
    text += "def mine(): return TrainConfig(steps=3)\ndef second(): return TrainConfig(steps=4)\n"
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert load_recipe(str(path)) == TrainConfig(steps=3)
    assert load_recipe(f"{path}:second") == TrainConfig(steps=4)


def test_sizes_by_head_survive_the_file_of_a_run(tmp_path):
    config = TrainConfig(model="m", output="o", layer_group_sizes=((8, 1), 8), data=("a", "b"))
    path = tmp_path / "train_config.json"
    path.write_text(json.dumps({"config": config.to_dict()}))
    loaded = load_recipe(str(path))
    assert loaded == config and loaded.cca() == config.cca()
    assert TrainConfig.from_dict({"data": ["a"]}).data == ("a",)
    assert not loaded.is_idle() and loaded.cca().layer_group_sizes == ((8, 1), 8)


@pytest.mark.parametrize(
    "processes, context_parallel, rows", [(1, 1, 6), (8, 1, 48), (8, 2, 24), (8, 8, 6), (1, 2, 6)]
)
def test_processes_that_share_a_row_count_once(processes, context_parallel, rows):
    config = TrainConfig(accumulation=3, batch_size=2, context_parallel=context_parallel)
    assert config.rows_per_step(processes) == rows


def test_fetch_is_a_part_of_the_attention_and_of_cca_alone():
    cca = TrainConfig(fetch_groups=3, fetch_index="mean").cca()
    assert (cca.fetch_groups, cca.fetch_index, cca.fetch_share) == (3, "mean", 16)
    with pytest.raises(ValueError, match="fetch_groups must be 0 with method 'window'"):
        TrainConfig(fetch_groups=3, method="window")
    spread = {"fetch_groups": 3, "context_parallel": 2, "sink_size": 0}
    assert TrainConfig(**spread).cca().fetch_groups == 3
    with pytest.raises(ValueError, match="fetch_groups must be at least 0"):
        TrainConfig(fetch_groups=-1)


def test_the_card_names_all_of_the_attention():
    plain = TrainConfig.preset("paper", group_size=4, window_size=9)
    text = "Core Context Aware attention, g = 4, s = 9"
    assert card._attention(plain) == text
    assert card._attention(plain.replace(sink_size=4)) == f"{text}, the first 4 tokens raw"
    masses = plain.replace(core_mass=True)
    assert card._attention(masses) == f"{text}, core tokens with their masses"
    fetching = plain.replace(fetch_groups=3, fetch_index="mean")
    assert card._attention(fetching) == f"{text}, raw tokens of 3 groups fetched by mean"
    by_layer = plain.replace(layer_group_sizes=(4, (8, 1)))
    assert card._attention(by_layer) == text.replace("g = 4", "g = [4, (8, 1)] by layer")
    assert card._attention(plain.replace(method="window")) == "window attention"


# The command


@pytest.mark.parametrize(
    "options, settings",
    [
        (("--warmup-steps", "0"), {"warmup_steps": 0}),
        (("--no-checkpointing", "--fuse"), {"checkpointing": False, "fuse": True}),
        (("--dtype", "float32"), {"precision": "float32"}),
        (("--precision", "bfloat16", "--sinks", "4"), {"precision": "bfloat16", "sink_size": 4}),
        (("--data", "a", "--data", "b"), {"data": ("a", "b")}),
        (("--lora-targets", "x", "--lora-targets", "y"), {"lora_targets": ("x", "y")}),
        (
            ("--layer-group-sizes", "4", "--layer-group-sizes", "8"),
            {"layer_group_sizes": (4, 8)},
        ),
        (("--learning-rate", "1e-4"), {"learning_rate": 1e-4}),
        (("--shape", '{"hidden_size": 8}'), {"shape": {"hidden_size": 8}}),
        (("--seed", "7", "--deterministic"), {"seed": 7, "deterministic": True}),
        (
            ("--fetch-groups", "3", "--fetch-index", "mean"),
            {"fetch_groups": 3, "fetch_index": "mean"},
        ),
    ],
)
def test_an_option_replaces_a_recipes_setting(options, settings, tmp_path, monkeypatch, capsys):
    recipe = TrainConfig(model="m", warmup_steps=9, checkpointing=True, data=("old",), fuse=False)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(recipe.to_dict()))
    configs = []

    def train(config):
        configs.append(config)
        losses = [(1, 3.0), (2, 2.0)]
        return run.Result(Path("out"), 2, losses, {"divergence": 0.5}, {"eval_loss": 1.5}, 0)

    monkeypatch.setattr(run, "train", train)
    assert main(["train", str(path), *options]) == 0
    assert configs == [recipe.replace(**settings)]
    line = "out: 2 steps, loss 2.0000, divergence 0.5000, eval loss 1.5000\n"
    assert capsys.readouterr().out == line
    monkeypatch.setenv("RANK", "1")
    assert main(["train", str(path), *options]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "method, option, is_used",
    [
        ("full", ("--sinks", "8"), False),
        ("window", ("--group-size", "8", "--window-size", "64"), True),
        ("streaming_llm", ("--sinks", "8"), False),
        ("window", ("--no-core-mass",), False),
        ("window", ("--fetch-groups", "0"), True),
        ("window", ("--fetch-groups", "64"), False),
        ("window", ("--preset", "default"), False),
        ("window", ("--preset", "small"), False),
        ("cca", ("--preset", "small"), True),
        ("cca", ("--sinks", "8"), True),
    ],
)
def test_no_option_of_the_attention_is_ignored(method, option, is_used, monkeypatch, capsys):
    result = run.Result(Path("out"), 1, [(1, 3.0)], {}, {}, 0)
    monkeypatch.setattr(run, "train", lambda config: result)
    argv = ["train", "paper", "--model", "m", "--method", method, *option]
    assert main(argv) == (0 if is_used else 2)
    said = f"must be left out with method '{method}', which would ignore it, got "
    assert (said in capsys.readouterr().err) is not is_used


def test_a_preset_replaces_a_recipes_attention_and_options_change_it(monkeypatch, capsys):
    configs = []
    result = run.Result(Path("out"), 1, [(1, 3.0)], {}, {}, 0)
    monkeypatch.setattr(run, "train", lambda config: configs.append(config) or result)
    assert main(["train", "paper", "--model", "m", "--preset", "small", "--sinks", "8"]) == 0
    assert configs[0].cca() == CCAConfig.preset("small", sink_size=8)
    assert configs[0] == TrainConfig.preset("small", model="m", sink_size=8, fit_memory=True)
    assert main(["train", "--model", "m", "--preset", "smal"]) == 2
    assert "preset must be one of 'default'" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", [(), ("paper",)])
def test_an_option_that_is_gone_is_refused_in_one_line(recipe, tmp_path, monkeypatch, capsys):
    model = save_tiny_model(tmp_path / "model")
    result = run.Result(Path("out"), 1, [(1, 3.0)], {}, {}, 0)
    monkeypatch.setattr(run, "train", lambda config: result)
    capsys.readouterr()
    for name, value, harmless in (
        ("pooling", "mean", "cca"),
        ("fetch-index", "core", "mean"),
        ("raw-heads", "auto", "0"),
    ):
        argv = ["train", *recipe, "--model", model, f"--{name}"]
        assert main([*argv, harmless]) == 0
        assert main([*argv, value]) == 2
        error = capsys.readouterr().err
        assert f"error: {name.replace('-', '_')} must not be '{value}', " in error
        assert "removed in version" in error and error.count("\n") == 1
    assert main(["train", "raw", "--model", model]) == 2
    assert "error: recipe must not be 'raw', the recipe of KV heads" in capsys.readouterr().err
    assert main(["train", "--help"]) == 0
    assert "--pooling" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "recipe, options, is_measured",
    [
        ((), (), True),
        ((), ("--method", "window"), True),
        ((), ("--strategy", "scratch"), True),
        ((), ("--steps", "3"), True),
        ((), ("--batch-size", "2"), False),
        ((), ("--accumulation", "2"), False),
        ((), ("--checkpointing",), False),
        ((), ("--batch-size", "2", "--fit-memory"), True),
        ((), ("--no-fit-memory",), False),
        (("fetch",), (), True),
        (("fetch",), ("--no-checkpointing",), False),
        (("mine.json",), (), False),
        (("mine.json",), ("--fit-memory",), True),
    ],
)
def test_the_memory_splits_a_step_unless_options_or_a_file_do(
    recipe, options, is_measured, tmp_path, monkeypatch
):
    (tmp_path / "mine.json").write_text(json.dumps(TrainConfig().to_dict()))
    monkeypatch.chdir(tmp_path)
    configs = []
    result = run.Result(Path("out"), 1, [(1, 3.0)], {}, {}, 0)
    monkeypatch.setattr(run, "train", lambda config: configs.append(config) or result)
    model = save_tiny_model(tmp_path / "model")
    assert main(["train", *recipe, "--model", model, *options]) == 0
    assert configs[0].fit_memory == is_measured
    if not options:
        assert (configs[0].batch_size, configs[0].checkpointing) == (1, True)


def test_an_adapted_checkpoint_is_trained_by_the_memory_too(tmp_path, monkeypatch):
    model = save_tiny_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "cca": CCAConfig.pooling(8, 64).to_dict()}))
    configs = []
    result = run.Result(Path("out"), 1, [(1, 3.0)], {}, {}, 0)
    monkeypatch.setattr(run, "train", lambda config: configs.append(config) or result)
    assert main(["train", "--model", model]) == 0
    assert configs[0].group_size == 8 and configs[0].fit_memory


def test_an_option_that_is_no_json_is_named_as_it_was_given(capsys):
    assert main(["train", "paper", "--shape", "{2"]) == 2
    assert "error: shape must be JSON, got '{2': " in capsys.readouterr().err


def test_the_help_shows_the_default_recipes_values_and_lists(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for text in (
        "by the end of their names. May be repeated. Default: q_proj k_proj v_proj o_proj.",
        "Tokens of a training row, L; raises the model's max_position_embeddings if less. Default: "
        "8192.",
        "a third more work. Default: True.",
        "Take as many of a step's rows at once as the GPU's memory holds",
        "Optimizer steps. Default: 120.",
        "0 is CCA. Default: 64.",
        "Tokens per core token (g), at least 1. Default: 32.",
    ):
        assert text in shown, text
    assert "wandb. May be repeated. " in shown and "Default: False" not in shown
    assert TrainConfig().data == TrainConfig().eval_data == ()


# Trainer's arguments


def test_every_setting_reaches_trainer(tmp_path):
    config = TrainConfig(
        output=str(tmp_path),
        steps=7,
        batch_size=2,
        accumulation=3,
        learning_rate=4e-3,
        min_learning_rate=1e-3,
        warmup_steps=5,
        weight_decay=0.1,
        beta2=0.9,
        max_grad_norm=0.5,
        eval_every=4,
        eval_data=("e",),
        save_every=6,
        log_every=8,
        seed=11,
        precision="bfloat16",
    )
    made = arguments.arguments_of(config)
    wanted = {
        "output_dir": str(tmp_path),
        "max_steps": 7,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 3,
        "learning_rate": 4e-3,
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.25},
        "warmup_steps": 5,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.9,
        "max_grad_norm": 0.5,
        "bf16": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 6,
        "logging_steps": 8,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "seed": 11,
        "data_seed": 11,
        "remove_unused_columns": False,
    }
    assert {name: getattr(made, name) for name in wanted} == wanted
    plain = arguments.arguments_of(config.replace(eval_every=0, precision="float32"))
    assert not plain.bf16 and plain.eval_strategy == "no"
    assert arguments.arguments_of(config.replace(eval_data=())).eval_strategy == "no"
    arguments.set_split(made, memory_fit.Split(3, 2, False))
    assert (made.train_batch_size, made.gradient_accumulation_steps) == (3, 2)
    assert not getattr(made, arguments.checkpointing_name())
    assert getattr(plain, arguments.checkpointing_name())
    still = arguments.arguments_of(config.replace(learning_rate=0, min_learning_rate=0))
    assert still.lr_scheduler_kwargs == {"min_lr_rate": 0.0}


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize(
    "precision, half", [("auto", None), ("float32", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_arguments_depend_on_the_device(has_gpu, precision, half, checkpointing, monkeypatch):
    given = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(
        "transformers.TrainingArguments",
        lambda **options: (
            given.update(options),
            SimpleNamespace(device=torch.device("cuda"), n_gpu=1),
        )[1],
    )
    arguments.arguments_of(TrainConfig(precision=precision, checkpointing=checkpointing))
    assert given["bf16"] == (has_gpu if half is None else half)
    assert given["use_cpu"] == (not has_gpu) and given["dataloader_pin_memory"] == has_gpu
    (kept,) = [given[name] for name in given if name.endswith("_checkpointing")]
    (options,) = [given[name] for name in given if name.endswith("_checkpointing_kwargs")]
    assert kept == checkpointing and options == {"use_reentrant": False}
    assert "fsdp" not in given


def test_a_process_takes_a_gpu_and_no_more(tmp_path, monkeypatch):
    def set_up(self):
        self.distributed_state = None
        self._n_gpu = 4
        return torch.device("cuda", 0)

    devices = functools.cached_property(set_up)
    devices.__set_name__(transformers.TrainingArguments, "_setup_devices")
    monkeypatch.setattr(transformers.TrainingArguments, "_setup_devices", devices)
    made = arguments.arguments_of(TrainConfig(output=str(tmp_path), batch_size=3))
    assert (made.n_gpu, made.train_batch_size) == (1, 3)


@pytest.mark.parametrize("world, has_gpu", [(1, True), (8, False)])
def test_fsdp_needs_both_processes_and_gpus(world, has_gpu, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    kind = "a GPU" if has_gpu else "a CPU"
    with pytest.raises(UserError, match=f"with a GPU each, got {world} on {kind}"):
        arguments._check_fsdp(has_gpu)


# The folder


def test_a_run_goes_on_with_its_own_settings_but_for_those_that_change_no_result(tmp_path):
    config = TrainConfig(output="o")
    free = {"output", "workers", "cache_dir", "report_to", "save_every", "keep"}
    free |= {"log_every", "eval_every", "fit_memory"}
    for name, value in config.to_dict().items():
        saved = {"config": {**config.to_dict(), name: "changed"}}
        (tmp_path / folder.SETTINGS).write_text(json.dumps(saved))
        if name in free:
            folder.check_folder(tmp_path, config)
            continue
        with pytest.raises(UserError) as error:
            folder.check_folder(tmp_path, config)
        assert f"other settings: {name} was 'changed', got {value!r}." in str(error.value)


def test_the_folder_of_a_run_says_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "source_version", lambda: ("abc", True))
    monkeypatch.setattr(folder, "versions", lambda: {"torch": "9"})
    (tmp_path / ".saving").mkdir()
    config = TrainConfig(steps=3)
    # Only the run's own remains are in it.
    with pytest.raises(UserError, match="must be a new or empty folder"):
        folder.claim(tmp_path, config, {})
    (tmp_path / folder.SETTINGS).write_text(json.dumps({"config": config.to_dict()}))
    facts = {"processes": 2, "rows": "r"}
    folder.claim(tmp_path, config, facts)
    saved = json.loads((tmp_path / folder.SETTINGS).read_text())
    assert saved == {
        "config": config.to_dict(),
        **facts,
        "commit": "abc",
        "dirty": True,
        "versions": {"torch": "9"},
    }
    assert not (tmp_path / ".saving").exists()
    for facts, message in (
        ({"processes": 1, "rows": "r"}, "a run of 2 processes, got 1: a step"),
        ({"processes": 2, "rows": "s"}, "a run on other data"),
    ):
        with pytest.raises(UserError, match=message):
            folder.check_folder(tmp_path, config, facts)
    old = saved | {"config": {**saved["config"], "raw_heads": None}}
    (tmp_path / folder.SETTINGS).write_text(json.dumps(old))
    with pytest.raises(UserError, match="cannot be read: raw_heads must not be None, a search"):
        folder.check_folder(tmp_path, config)
    (tmp_path / "runs").mkdir()
    (tmp_path / "checkpoint-3").mkdir()
    folder.release(tmp_path)  # a checkpoint holds the folder
    assert {path.name for path in tmp_path.iterdir()} == {
        "runs",
        "checkpoint-3",
        folder.SETTINGS,
    }
    (tmp_path / "checkpoint-3").rmdir()
    (tmp_path / ".deleting").mkdir()
    folder.release(tmp_path)
    assert not list(tmp_path.iterdir())


# Checkpoints


class _Unwritable:
    def __reduce__(self):
        raise RuntimeError("a bug in what is saved")


class _Full(io.RawIOBase):
    def write(self, data):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "write, is_failure",
    [
        (lambda: Path("/none/at/all").write_text(""), True),
        (lambda: (_ for _ in ()).throw(SafetensorError("no space")), True),
        (lambda: torch.save({"a": torch.zeros(1)}, "/none/at/all"), True),
        (lambda: torch.save({"a": torch.zeros(9)}, _Full()), True),
        (lambda: torch.save(_Unwritable(), io.BytesIO()), False),
        (lambda: torch.zeros(2) @ torch.zeros(3), False),
        (lambda: int("x"), False),
    ],
)
def test_a_failure_to_write_is_no_bug(write, is_failure):
    with pytest.raises(Exception) as error:
        write()
    assert is_write_failure(error.value) == is_failure


# The card


def test_the_card_shows_data_losses_and_settings_but_no_paths(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    config = TrainConfig(
        model=str(tmp_path / "base"),
        output=str(tmp_path / "out/mine"),
        data=(str(tmp_path / "a.txt"), "hub:me/one"),
        eval_data=(str(tmp_path / "b.txt"),),
        cache_dir=str(tmp_path / "cache"),
        workers=77,
        steps=9,
        context_length=4096,
        distil=0.25,
        sink_size=4,
    )
    history = [
        {"step": 3, "loss": 4.0, "cross_entropy": 3.5},
        {"step": 5, "eval_loss": 2.25},
        {"step": 9, "loss": 2.0, "cross_entropy": 1.5},
    ]
    drawn = []
    monkeypatch.setattr(card, "_draw", lambda *curves: drawn.append(curves))
    monkeypatch.setattr(card, "source_version", lambda: (None, True))
    monkeypatch.setattr(card, "versions", lambda: {"torch": "9", "numpy": "8"})
    metrics = {"eval_loss": 2.25, "eval_perplexity": 9.4877}
    card.write(tmp_path, config, history, metrics, 12345)
    assert drawn == [(tmp_path / "loss.png", [(3, 3.5), (9, 1.5)], [(5, 2.25)])]
    text = (tmp_path / "README.md").read_text()
    for shown in (
        "# mine\n",
        "trained by strategy `full` from `base`.",
        "g = 32, s = 160, the first 4 tokens raw",
        "- 9 steps, 12345 tokens, rows of 4096 tokens",
        "- data: `a.txt`, `hub:me/one`",
        "- loss: 4.0000 at step 3, 2.0000 at step 9",
        "- distilled: 0.25 of this loss",
        "- cross-entropy: 3.5000 at first, 1.5000 at last",
        "- evaluation: loss 2.2500, perplexity 9.488",
        "- code: commit unknown with changes, torch 9, numpy 8",
        "\ndatasets:\n- me/one\n",
        "\n- long-context\n",
    ):
        assert shown in text, shown
    for hidden in (str(tmp_path), "secret", "77", "base_model", "core tokens were idle"):
        assert hidden not in text, hidden
    settings = json.loads(text[text.index("```json\n") + 8 :].split("\n```")[0])
    assert settings["model"] == "base"
    assert settings["eval_data"] == ["b.txt"] and settings["distil"] == 0.25
    assert set(config.to_dict()) - set(settings) == {"output", "cache_dir", "workers"}

    config = config.replace(model="me/base", distil=0.0, method="window", sink_size=0)
    card.write(tmp_path, config, history[::2], {}, 5)
    text = (tmp_path / "README.md").read_text()
    assert "base_model: me/base" in text and "with window attention" in text
    assert "distilled" not in text and "evaluation" not in text
    card.write(tmp_path, config.replace(data=("a.txt",)), history[::2], {}, 5)
    assert "\ndatasets:" not in (tmp_path / "README.md").read_text()
    card.write(tmp_path, config.replace(strategy="scratch"), history[::2], {}, 5)
    text = (tmp_path / "README.md").read_text()
    assert "base_model" not in text and "`scratch` with the shape of `me/base`" in text
    card.write(tmp_path, config, [{"step": 2, "loss": 1.0}], {}, 5)
    assert drawn[-1] == (tmp_path / "loss.png", [(2, 1.0)], [])
