"""Promises of training that a run rarely shows: where a stream resumes, what an evaluation counts,
and when a checkpoint gets its name."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytest.importorskip("datasets", reason="training reads its data with datasets")

from corecontext.data.packing import IGNORED
from corecontext.data.row_stream import StreamedRows, open_shards
from corecontext.train.checkpoint import publish
from corecontext.train.trainer import CCATrainer


def test_streamed_rows_resume_at_the_very_row(tmp_path):
    """Also where a checkpoint falls on the row before or after the first one of a block."""
    path = tmp_path / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"<{i}>" + "ab" * (i % 9)}) + "\n" for i in range(40))
    )

    def rows() -> StreamedRows:
        encode = lambda texts: [list(text.encode()) for text in texts]  # noqa: E731
        return StreamedRows(open_shards([str(path)]), encode, 31, 24, block_size=6)

    stream = rows()
    want = [stream[i]["input_ids"] for i in range(24)]
    trainer = SimpleNamespace(
        args=SimpleNamespace(should_save=True), train_dataset=stream, _rows_per_step=lambda: 1
    )
    first_rows = set()
    for step in range(24):
        trainer.state = SimpleNamespace(global_step=step)
        CCATrainer._save_stream(trainer, tmp_path)
        state = json.loads((tmp_path / "stream.json").read_text())
        first_rows.add(state["row"])
        resumed = rows()
        resumed.load_state_dict(state)
        assert torch.equal(resumed[step]["input_ids"], want[step]), step
    assert len(first_rows) > 4


def test_every_evaluation_row_counts_once_on_any_number_of_processes():
    """The number of processes does not divide that of the rows: fillers keep ranks in step."""

    class Model:
        def eval(self) -> None:
            pass

        def __call__(self, labels: torch.Tensor, **inputs: object) -> dict[str, torch.Tensor]:
            return {"loss": (labels[:, 1:] != IGNORED).sum() * labels.max().float()}

    rows = []
    for row, length in enumerate((4, 7, 5, 9, 6)):
        ids = torch.full((length,), row + 1)
        rows.append({"input_ids": ids, "labels": ids, "position_ids": ids, "row": row})
    sums: list[torch.Tensor] = []

    def metrics(world: int, rank: int) -> dict[str, float]:
        trainer = mock.Mock(spec=CCATrainer, eval_dataset=rows, model_wrapped=Model(), wire=None)
        trainer.args = SimpleNamespace(world_size=world, process_index=rank, device="cpu")
        trainer.context_parallel = 1
        trainer.state = trainer.control = trainer.callback_handler = mock.Mock()
        trainer._prepare_inputs = lambda inputs: inputs

        def all_reduce(total: torch.Tensor) -> None:
            sums.append(total.clone())
            total += sum(sums[:-1])

        with mock.patch.object(dist, "all_reduce", all_reduce):
            return CCATrainer.evaluate(trainer)

    alone = metrics(1, 0)
    for world in (2, 3, 4):
        sums.clear()
        assert [metrics(world, rank) for rank in range(world)][-1] == alone


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    staged = tmp_path / "staging/checkpoint-1"
    (staged / "part").mkdir(parents=True)
    (staged / "weights").write_text("w")
    (staged / "part/optimizer").write_text("o")
    content = {path.stat().st_ino for path in (staged, *staged.rglob("*"))}
    events: list[object] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "rename", lambda *names: (events.append("name"), rename(*names)))
    publish(staged, tmp_path / "checkpoint-1")
    named = events.index("name")
    assert set(events[:named]) == content
    assert events[named + 1 :] == [tmp_path.stat().st_ino]  # and then the name itself
