"""What a run begins with: a teacher, what the checkpoint says, and the default of it all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tiny_model import save_tiny_model
from train_runs import assert_equal, stop_at, weights

import corecontext
from corecontext.cli import main
from corecontext.config import PRESETS
from corecontext.inference import Engine
from corecontext.integrations.hf.enabling import handle_of
from corecontext.train import TrainConfig
from corecontext.train.run import train
from corecontext.train.student import best_settings


@pytest.fixture(scope="module")
def sharp(setting, tmp_path_factory) -> TrainConfig:
    """The setting with a model to whose predictions it matters what attention sees."""
    folder = tmp_path_factory.mktemp("sharp")
    name = save_tiny_model(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.dim() > 1 else 1
    model.save_pretrained(name)
    return setting.replace(model=name, output=str(folder / "whole"), distil=1.0)


def test_distilled_a_model_comes_to_predict_as_it_did_under_full_attention(sharp, tmp_path, caplog):
    def losses(name, **changes):
        result = train(sharp.replace(output=str(tmp_path / name), **changes))
        parts.append(result.parts)
        return [loss for _, loss in result.losses], result.metrics

    parts: list[dict[str, float]] = []
    wide, _ = losses("wide", window_size=96, steps=1)
    assert "no query of a row of 96 tokens sees a core token: CCA is full attention" in caplog.text
    assert abs(wide[0]) < 1e-6  # CCA that sees every token is full attention
    based, _ = losses("based", window_size=96, steps=1, rope_theta=5e5)
    assert based[0] > 1e-3  # the base is the student's alone
    caplog.clear()
    # Always all rows.
    narrow, _ = losses("narrow", steps=6, data=sharp.data[:1], batch_size=15, learning_rate=2e-4)
    assert "no query of a row" not in caplog.text
    assert narrow[0] > 0.01 and narrow[-1] < 0.9 * narrow[0]
    # Nothing learns at rate 0: the loss is a mixture of both, and what is evaluated is none.
    still = {"learning_rate": 0.0, "steps": 2, "eval_data": sharp.data[:1]}
    found = [losses(f"still{share}", distil=share, **still) for share in (0.0, 1.0, 0.25)]
    for none, whole, quarter in zip(*(training for training, _ in found)):
        assert quarter == pytest.approx(0.75 * none + 0.25 * whole, rel=1e-5)
    assert found[0][1] == found[1][1] == found[2][1]
    # The log has them apart.
    state = json.loads((tmp_path / "still0.25/checkpoint-2/trainer_state.json").read_text())
    for step, entry in enumerate(state["log_history"][:2]):
        assert entry["cross_entropy"] == pytest.approx(found[0][0][step], rel=1e-5)
        assert entry["divergence"] == pytest.approx(found[1][0][step], rel=1e-4)
    last = {name: entry[name] for name in ("cross_entropy", "divergence")}
    assert parts[-1] == last and parts[-3] == {}  # as the command prints them
    card = (tmp_path / "still0.25/model/README.md").read_text()
    assert (
        "- distilled: 0.25 of this loss is the divergence from the predictions of `model` as it was"
        in card
    )
    assert "- cross-entropy: " in card
    assert "distilled" not in (tmp_path / "still0.0/model/README.md").read_text()


def test_distilled_it_continues_bit_for_bit(sharp, tmp_path):
    """The teacher of a continued run is the model that the run began with."""
    for strategy in ("full", "lora"):
        config = sharp.replace(
            strategy=strategy, output=str(tmp_path / f"{strategy}-whole"), distil=0.5, steps=4
        )
        train(config)
        stopped = config.replace(output=str(tmp_path / strategy))
        stop_at(3, stopped)
        assert train(stopped).resumed_from == 2
        assert_equal(weights(stopped), weights(config))


def trained(setting, model, output, *options):
    """The exit code of a run of one step by the command."""
    paths = ["--model", model, "--output", str(output)]
    data = ["--data", setting.data[0], "--cache-dir", setting.cache_dir]
    return main(["train", *paths, *data, "--steps", "1", "--context-length", "64", *options])


@pytest.mark.parametrize(
    "options, expected",
    [
        ((), {"window_size": 13, "layer_group_sizes": ((8, 1), 8)}),
        (("--strategy", "lora"), {"window_size": 13, "layer_group_sizes": ((8, 1), 8)}),
        (("--window-size", "9"), {"window_size": 9, "layer_group_sizes": ((8, 1), 8)}),
        (("--group-size", "2"), {"group_size": 2, "window_size": 13}),
        (
            ("--strategy", "scratch"),
            # None of it: a new model.
            {"group_size": 16, "window_size": 1024, "sink_size": 16, "core_mass": True},
        ),
        (("--method", "full"), None),
    ],
)
def test_the_command_keeps_a_checkpoints_own_settings(setting, tmp_path, options, expected):
    """As `python -m reproduction layers --output` writes them; what an option says counts more."""
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "run"
    held = json.loads((tmp_path / "model" / "config.json").read_text())
    held["cca"] = corecontext.CCAConfig.paper(
        8, 13, layer_group_sizes=((8, 1), 8), cache_dtype="int8", store="host"
    ).to_dict()
    (tmp_path / "model" / "config.json").write_text(json.dumps(held))
    assert trained(setting, model, out, *options) == 0
    saved = getattr(transformers.AutoConfig.from_pretrained(out / "model"), "cca", None)
    if expected is None:
        assert saved is None
    else:
        cache = {"cache_dtype": "int8", "store": "host"}
        if "scratch" in options:
            cache = {}
        assert corecontext.CCAConfig.from_dict(saved) == corecontext.CCAConfig.paper(
            **{"group_size": 8, **cache, **expected}
        )


def test_without_a_recipe_a_run_has_what_works_best(sharp, tmp_path, capsys):
    """As far as it can have it; the paper's rule by its name, and what options say."""

    def run(name, *options):
        command = [
            "train",
            *([name] if name == "paper" else []),
            "--model",
            sharp.model,
            "--data",
            sharp.data[0],
            "--output",
            str(tmp_path / name),
            "--steps",
            "1",
            "--context-length",
            "128",
            "--group-size",
            "4",
            "--window-size",
            "32",
            "--cache-dir",
            sharp.cache_dir,
            *options,
        ]
        assert main(command) == 0
        config = json.loads((tmp_path / name / "train_config.json").read_text())["config"]
        return config["fetch_groups"], config["distil"]

    def saved_by(name):
        return corecontext.CCAConfig.from_dict(
            transformers.AutoConfig.from_pretrained(tmp_path / name / "model").cca
        )

    assert run("best") == (64, 0.5)
    assert (
        "by default: raw tokens of 64 groups for each query, the model as it was teaches, rate "
        "0.0001. " in capsys.readouterr().out
    )
    assert saved_by("best") == corecontext.CCAConfig(4, 32)
    assert run("paper") == (0, 0.0) and "by default" not in capsys.readouterr().out
    assert saved_by("paper") == corecontext.CCAConfig.paper(4, 32)
    assert run("none", "--fetch-groups", "0", "--distil", "0") == (0, 0.0)
    assert saved_by("none") == corecontext.CCAConfig.pooling(4, 32)
    assert "by default: rate 0.0001. " in capsys.readouterr().out
    assert run("window", "--method", "window") == (0, 0.0)
    assert "by default" not in capsys.readouterr().out
    assert run("scratch", "--strategy", "scratch") == (0, 0.0)
    assert saved_by("scratch") == corecontext.CCAConfig.pooling(4, 32)
    few = ("--fetch-groups", "3")
    assert run("lora", "--strategy", "lora", "--distil", "0.25", *few) == (3, 0.25)
    config = json.loads(Path(sharp.model, "config.json").read_text())
    short = tmp_path / "short"
    shutil.copytree(sharp.model, short)
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    # It cannot teach what it was not built for.
    assert run("long", "--model", str(short)) == (64, 0.0)
    assert run("sized", "--layer-group-sizes", "8", "--layer-group-sizes", "8") == (64, 0.5)


def test_a_model_of_the_default_recipe_generates_what_it_predicts(sharp, tmp_path, caplog):
    """At the recipe's own g, s and k, its rows as short as they can be."""
    (tmp_path / "long.txt").write_text("All good things come to those who wait. " * 70)
    command = ["train", "--model", sharp.model, "--data", str(tmp_path / "long.txt")]
    command += ["--steps", "1", "--accumulation", "1", "--context-length", "2300"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "run")]
    assert main(command) == 0 and "is full attention" not in caplog.text
    model = corecontext.from_pretrained(tmp_path / "run/model")
    assert handle_of(model).config == corecontext.CCAConfig()
    ids = torch.randint(0, 256, (1, 2400), generator=torch.Generator().manual_seed(0))

    def generated(model):
        """Return the answer and its tokens' predictions without a cache."""
        (answer,) = Engine(model, chunk_size=600).generate(ids, max_new_tokens=40)
        read = torch.cat([ids, torch.tensor([answer])], dim=1)
        with torch.no_grad():
            predicted = model(read, use_cache=False).logits[0, 2399:-1].argmax(-1)
        return answer, predicted.tolist()

    # Without a cache each token chooses by itself.
    by_choice = corecontext.CCAConfig(prefill="fetch")
    answer, predicted = generated(corecontext.from_pretrained(tmp_path / "run/model", by_choice))
    assert answer == predicted
    # By default a CPU reads all of so short a text.
    in_full, predicted = generated(model)
    assert in_full != predicted
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    full, predicted = generated(plain)
    assert in_full == full == predicted


def test_the_default_schedule_is_for_trained_weights_and_the_models_length(tmp_path):
    """120 steps of 8 rows of 8,192 tokens; options count more, and a model may be shorter."""
    for length, rows in ((8192, 8192), (300, 300), (20_000, 8192)):
        model = save_tiny_model(tmp_path / str(length), max_length=length)
        best = best_settings(TrainConfig(model=model), {"steps"})
        assert best["context_length"] == rows and "steps" not in best
        assert (best["accumulation"], best["learning_rate"], best["distil"]) == (8, 1e-4, 0.5)
    assert best_settings(TrainConfig(model=model), {})["steps"] == 120
    assert "accumulation" not in best_settings(
        TrainConfig(model=model, batch_size=2), {"batch_size"}
    )
    scratch = TrainConfig(model=model, strategy="scratch")
    pooling = PRESETS["pooling"].settings
    assert best_settings(scratch, {}) == pooling
    window = best_settings(TrainConfig(model=model, method="window"), {})
    assert window == {"window_size": 1024, "fetch_groups": 0}


def test_sizes_by_head_and_constant_groups_of_a_checkpoint_are_not_lost(setting, tmp_path, capsys):
    model = save_tiny_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    plain = json.loads(path.read_text())

    def run(name, *options, **cca):
        path.write_text(json.dumps({**plain, "cca": corecontext.CCAConfig.paper(**cca).to_dict()}))
        code = trained(setting, model, tmp_path / name, *options)
        saved = tmp_path / name / "model"
        return code, corecontext.CCAConfig.paper(
            **transformers.AutoConfig.from_pretrained(saved).cca
        ) if code == 0 else None

    assert run("heads", window_size=13, head_group_sizes=(1, 8)) == (
        0,
        corecontext.CCAConfig.paper(16, 13, layer_group_sizes=((1, 8), (1, 8))),
    )
    equal = run("equal", "--group-size", "4", window_size=13, head_group_sizes=(1, 8))
    assert equal == (0, corecontext.CCAConfig.paper(4, 13))
    assert run("groups", num_groups=4) == (2, None)
    assert (
        f"error: group_size must be given for '{model}', whose groups are 4 at any"
        in capsys.readouterr().err
    )
    assert run("sized", "--group-size", "4", num_groups=4) == (0, corecontext.CCAConfig.paper(4))
