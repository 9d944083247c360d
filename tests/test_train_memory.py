"""A step's rows are split by the memory of the GPU: the sums, the passes that are measured, and
runs that give the same whatever the split."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import tiny_model
from train_runs import weights

from corecontext.train import TrainConfig, arguments, memory_fit, trainer
from corecontext.train.memory_fit import Split, bytes_of_pass, describe, largest_divisor
from corecontext.train.run import train

GIB = 2**30

# The sums


@pytest.mark.parametrize(
    "rows, peaks, expected",
    [
        (1, [10, 17], 10),
        (2, [10, 17], 17),
        (3, [10, 17], 24),
        (8, [10, 17], 59),
        (1, [10], 10),
        (2, [10], math.inf),
        (1, [], math.inf),
    ],
)
def test_each_row_after_the_second_takes_as_many_bytes_as_it(rows, peaks, expected):
    assert bytes_of_pass(rows, peaks) == expected


@pytest.mark.parametrize(
    "rows, peaks, free, expected",
    [
        (8, [10, 17], 59, 8),
        (8, [10, 17], 58, 4),  # 7 rows would fit, but 8 is no multiple of them
        (8, [10, 17], 31, 4),
        (8, [10, 17], 30, 2),
        (8, [10, 17], 16, 1),
        (8, [10, 17], 9, 0),
        (6, [10, 17], 30, 3),
        (7, [10, 17], 51, 1),
        (1, [10], 10, 1),
        (4, [10], 1000, 1),
        (4, [], 1000, 0),
        (4, [10, 17], -1, 0),
    ],
)
def test_the_largest_divisor_that_fits_is_taken(rows, peaks, free, expected):
    assert largest_divisor(rows, peaks, free) == expected


def test_the_line_has_rows_and_bytes():
    line = "8 rows at once, no recomputation: about 62 of 80 GiB"
    assert describe(8, 62.2 * GIB, 79.6 * GIB) == line
    assert describe(1, 30 * GIB, 80 * GIB).startswith("1 row at once, no recomputation: about 30 ")
    assert describe(0, 30 * GIB, 24 * GIB) == (
        "1 row at once, activations recomputed: 24 GiB hold no row without recomputation"
    )


# The passes


class FakeGpu:
    """A GPU of so many bytes beside the model, on which a pass takes `fixed` and `row` for each
    row."""

    def __init__(self, monkeypatch, size: int, fixed: int = 3, row: int = 7) -> None:
        self.size = size
        self.fixed = fixed
        self.row = row
        self.passes: list[int] = []
        self.real = memory_fit._run_pass
        monkeypatch.setattr(memory_fit, "free_bytes", lambda device: self.size)
        monkeypatch.setattr(memory_fit, "total_bytes", lambda device: self.size)
        monkeypatch.setattr(memory_fit, "PeakMemory", lambda device: self)
        monkeypatch.setattr(memory_fit, "_run_pass", self.run_pass)

    def run_pass(self, model, rows, length, arguments) -> None:
        """Run the real pass, unless the memory is too small."""
        self.passes.append(rows)
        self.real(model, rows, length, arguments)
        if self.read() > self.size:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def read(self) -> int:
        """Return the peak of the last pass."""
        return self.fixed + self.row * self.passes[-1]


def split_of(config, model=None, **changes):
    """Return the split for a tiny model on a CPU, and the model."""
    if model is None:
        model = tiny_model("llama")
    defaults = {"device": torch.device("cpu"), "bf16": False, "world_size": 1, "process_index": 0}
    settings = SimpleNamespace(**defaults | changes)
    return memory_fit.split_for_memory(model, config, settings), model


CONFIG = TrainConfig(fit_memory=True, accumulation=4, batch_size=2, context_length=100)
"""Rows are longer than the vocabulary."""


@pytest.fixture(scope="module")
def kept_bytes():
    """AdamW's two moments of the tiny model, in bytes."""
    return 2 * sum(weight.nbytes for weight in tiny_model("llama").parameters())


def test_passes_of_one_row_and_of_two_tell_how_many_fit(kept_bytes, monkeypatch, capsys):
    size = 10 * kept_bytes
    row = kept_bytes
    for fixed, expected in ((0, Split(8, 1, False)), (1, Split(4, 2, False))):
        # Eight rows take all that the moments and the tenth that stays free leave.
        gpu = FakeGpu(monkeypatch, size, fixed, row)
        split, model = split_of(CONFIG)
        assert split == expected and gpu.passes == [1, 1, 2]
        assert all(weight.grad is None for weight in model.parameters()) and model.training
    assert capsys.readouterr().err.splitlines()[0] == (
        f"8 rows at once, no recomputation: about {9 * row / GIB:.0f} of {size / GIB:.0f} GiB"
    )


def test_of_a_single_row_no_second_is_tried(kept_bytes, monkeypatch):
    gpu = FakeGpu(monkeypatch, 10 * kept_bytes)
    assert split_of(CONFIG.replace(accumulation=1, batch_size=1))[0] == Split(1, 1, False)
    assert gpu.passes == [1, 1]


def test_where_two_rows_do_not_fit_one_is_taken(kept_bytes, monkeypatch):
    gpu = FakeGpu(monkeypatch, 10 * kept_bytes, row=6 * kept_bytes)
    split, model = split_of(CONFIG)
    assert split == Split(1, 8, False) and gpu.passes == [1, 1, 2]
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("share", [9, 11])
def test_where_no_row_fits_activations_are_recomputed(share, kept_bytes, monkeypatch, capsys):
    """Beside the moments of the optimizer, or at all."""
    gpu = FakeGpu(monkeypatch, 10 * kept_bytes, row=share * kept_bytes)
    split, model = split_of(CONFIG)
    assert split == Split(1, 8, True) and gpu.passes == ([1, 1, 2] if share == 9 else [1])
    assert all(weight.grad is None for weight in model.parameters())
    assert "hold no row without recomputation" in capsys.readouterr().err


def test_other_errors_of_a_pass_are_raised(monkeypatch):
    FakeGpu(monkeypatch, GIB)
    model = tiny_model("llama")
    model.forward = mock.Mock(side_effect=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        split_of(CONFIG, model)


def test_weights_that_are_not_trained_have_no_moments(kept_bytes, monkeypatch):
    FakeGpu(monkeypatch, 10 * kept_bytes, 1, kept_bytes)
    model = tiny_model("llama")
    model.base_model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    assert split_of(CONFIG, model)[0].batch_size == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"fit_memory": False},
        {"fsdp": True},
        {"context_parallel": 2},
        {"deterministic": True},
    ],
)
def test_nothing_is_measured_where_the_split_is_given_or_matters(changes, monkeypatch):
    gpu = FakeGpu(monkeypatch, GIB)
    assert split_of(CONFIG.replace(**changes))[0] is None
    assert gpu.passes == []


def test_nothing_is_measured_with_a_routers_loss_or_on_a_cpu(monkeypatch):
    split, model = split_of(CONFIG)
    assert split is None and not model.training
    gpu = FakeGpu(monkeypatch, GIB)
    model.config.output_router_logits = True
    assert split_of(CONFIG, model)[0] is None and gpu.passes == []


@pytest.mark.parametrize("others, expected", [(8, 8), (2, 2), (0, 0)])
def test_ranks_take_the_least_of_all(others, expected, kept_bytes, monkeypatch, capsys):
    def all_reduce(count, operation):
        assert operation == dist.ReduceOp.MIN
        count.fill_(min(int(count), others))

    # Two moments, and the buffers of gradients.
    FakeGpu(monkeypatch, 10 * kept_bytes, 0, 15 * kept_bytes // 16)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    split, _ = split_of(CONFIG, world_size=2, process_index=1)
    assert split == (Split(expected, 8 // expected, False) if expected else Split(1, 8, True))
    assert capsys.readouterr().err == ""  # the first rank prints


def test_among_processes_buffers_of_gradients_are_counted(kept_bytes, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda count, operation: None)
    FakeGpu(monkeypatch, 10 * kept_bytes, 0, kept_bytes)
    assert split_of(CONFIG)[0].batch_size == 8
    assert split_of(CONFIG, world_size=2)[0].batch_size == 4


# Runs


def outcome(config: TrainConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and final weights of a run."""
    result = train(config)
    return [loss for _, loss in result.losses], weights(config)


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that weights are equal but for rounding."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "changes",
    [{}, {"distil": 0.5}, {"distil": 0.5, "strategy": "lora", "lora_rank": 2}],
    ids=["plain", "distilled", "lora"],
)
def test_a_run_gives_the_same_whatever_the_split(setting, tmp_path, changes, monkeypatch, capsys):
    passes = []
    step = trainer.CCATrainer.training_step

    def counted(self, model, inputs, *args):
        is_recomputed = getattr(self.args, arguments.checkpointing_name())
        passes.append((inputs["row"], is_recomputed))
        return step(self, model, inputs, *args)

    monkeypatch.setattr(trainer.CCATrainer, "training_step", counted)
    rows = setting.replace(accumulation=4, steps=4, deterministic=False, **changes)
    losses, expected = outcome(rows.replace(output=str(tmp_path / "one")))
    FakeGpu(monkeypatch, GIB)
    fitted = rows.replace(output=str(tmp_path / "four"), fit_memory=True)
    fitted_losses, got = outcome(fitted)
    single = passes[:16]
    together = passes[16:]
    assert {(len(numbers), is_recomputed) for numbers, is_recomputed in single} == {(1, True)}
    assert {(len(numbers), is_recomputed) for numbers, is_recomputed in together} == {(4, False)}
    orders = [[row for numbers, _ in taken for row in numbers] for taken in (single, together)]
    assert orders[0] == orders[1]
    assert "4 rows at once, no recomputation: " in capsys.readouterr().err
    assert fitted_losses == pytest.approx(losses, rel=1e-5)
    assert_close(got, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU")
def test_on_a_gpu_all_rows_of_a_tiny_model_fit(setting, tmp_path, capsys):
    rows = setting.replace(accumulation=4, steps=2, distil=0.5, deterministic=False)
    losses, _ = outcome(rows.replace(output=str(tmp_path / "one")))
    capsys.readouterr()
    fitted_losses, _ = outcome(rows.replace(output=str(tmp_path / "four"), fit_memory=True))
    assert "4 rows at once, no recomputation: about " in capsys.readouterr().err
    assert fitted_losses == pytest.approx(losses, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU")
def test_on_a_gpu_further_rows_take_as_many_bytes_as_the_second():
    model = tiny_model("llama").cuda()
    config = CONFIG.replace(context_length=4096)
    settings = SimpleNamespace(device=torch.device("cuda", 0), bf16=True)
    peaks = memory_fit._measure_peaks(model, config, settings, most=4)
    assert peaks == sorted(peaks) and len(set(peaks)) == 4
    assert bytes_of_pass(4, peaks[:2]) == pytest.approx(peaks[3], rel=0.05)
