"""Runs the stages that are not done yet: each leaves its records in a file of its own, and needs
nothing but files.

So several processes, each with a GPU of its own, can share a work folder: each takes what nobody is
at.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
import traceback
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from corecontext.baselines import MInference
from corecontext.files import UserError, alone_in, atomic_path, make_folder, write_text
from corecontext.heads.budget import COARSE, Shape, Unit, spread
from corecontext.heads.report import layer_records
from corecontext.heads.search import search_units
from corecontext.inference.fuse import Fused
from corecontext.integrations.transformers import handle_of
from corecontext.record import Record, append_records, device_name, make_record, read_records
from corecontext.terminal import console, progress
from corecontext.visibility import group_size_for
from reproduction import scoring as measure
from reproduction.miniature import add_lora, attention, make_model, merge_lora
from reproduction.plan import (
    Method,
    Size,
    Stage,
    base_of,
    fine_config,
    layers_of,
    methods,
    sizes_of,
    stages,
)
from reproduction.texts import Corpus
from reproduction.training_loop import OutOfTime, thinned, train

RECORDS = "records.jsonl"
LAYERS = "layers.json"
WORTH_STARTING_S = 20.0
LOOK_AGAIN_S = 1.0  # while other processes are at all that could be done


class Miniature:
    """One reproduction in a work folder.

    Args:
        folder: Everything is kept here; a folder of another size or other data is refused.
        size: How large.
        data: Folder with texts, tokenizer and questions, or None for the bundled document.
        device: "cuda" or "cpu".
        finalists: More methods to run with every seed.
        minutes: Time of this invocation; a training under way is saved and goes on in the next.
        json: File that records are appended to, too.
    """

    def __init__(
        self,
        folder: str | Path,
        size: Size,
        data: str | None,
        device: str,
        *,
        finalists: tuple[str, ...] = (),
        minutes: float = math.inf,
        json_path: str | None = None,
    ) -> None:
        self.folder, self.size, self.device = Path(folder), size, device
        self.plan, self.methods = stages(size, finalists), methods(size)
        self.corpus, self.json_path = Corpus(folder, data), json_path
        self.end = time.monotonic() + 60 * minutes
        self.workers = 0 if size.name == "smoke" else max(1, min(12, (os.cpu_count() or 2) - 2))
        self._claim({"size": size.name, "data": self.corpus.identity()})

    def _claim(self, what: dict[str, Any]) -> None:
        """Take the folder, or find it taken by the same."""
        make_folder(self.folder)
        path = self.folder / "run.json"
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held != what:
                raise UserError(
                    f"out '{self.folder}' must be a folder of this run, got one of {held}. Choose another."
                )
        elif any(self.folder.iterdir()):
            raise UserError(
                f"out '{self.folder}' must be empty or hold an earlier run, got other files."
            )
        else:
            path.write_text(json.dumps(what) + "\n", encoding="utf-8")

    def time_left(self) -> float:
        """Seconds left to this invocation."""
        return self.end - time.monotonic()

    def is_done(self, name: str) -> bool:
        """Whether a stage has left its records; the tokens, which are large, may have been left
        behind since."""
        return (self.folder / name / RECORDS).exists() and (
            name != "prepare" or self.corpus.is_prepared()
        )

    def is_all_done(self, only: Sequence[str] = ()) -> bool:
        """Whether `run` would have nothing to do."""
        return not self._to_do(only)

    def _to_do(self, only: Sequence[str]) -> list[Stage]:
        """What is not done, of all stages or of some and what they need, in order."""
        by_name = {stage.name: stage for stage in self.plan}
        for name in only:
            if name not in by_name:
                raise UserError(f"stage must be one of {', '.join(by_name)}, got {name!r}.")
        wanted = set(only or by_name)
        while more := {need for name in wanted for need in by_name[name].needs} - wanted:
            wanted |= more
        return [
            stage for stage in self.plan if stage.name in wanted and not self.is_done(stage.name)
        ]

    def run(self, only: Sequence[str] = ()) -> bool:
        """Run what is not done, or of that only some stages and what they need; returns whether all
        of it is done now.

        Stages that another process is at are waited for. One that fails keeps only those waiting
        that need it.

        Raises:
            UserError: no such stage.
            Exception: what the first failed stage raised, once nothing else is left to do.
        """
        failed: dict[str, Exception] = {}
        while todo := [stage for stage in self._to_do(only) if not self._is_lost(stage, failed)]:
            if self.time_left() < WORTH_STARTING_S and math.isfinite(self.end):
                return False
            for stage in todo:
                if all(map(self.is_done, stage.needs)):
                    folder = self.folder / stage.name
                    folder.mkdir(exist_ok=True)
                    with alone_in(folder) as alone:
                        if alone and not self.is_done(stage.name):
                            console().print(f"{stage.name} ({len(todo)} to go)")
                            try:
                                if not self._finish(stage):
                                    return False
                            except Exception as error:
                                failed[stage.name] = error
                                console().print(f"{stage.name} failed: {error}")
                                if not isinstance(error, UserError):
                                    traceback.print_exc()
                                if self.device.startswith("cuda"):
                                    torch.cuda.synchronize()  # raises where the GPU is of no more use to this process
                            break
            else:
                time.sleep(LOOK_AGAIN_S)
        for error in failed.values():
            raise error
        return True

    def _is_lost(self, stage: Stage, failed: Container[str]) -> bool:
        """Whether a stage, or one that it needs, has failed."""
        by_name = {one.name: one for one in self.plan}
        return stage.name in failed or any(
            not self.is_done(need) and self._is_lost(by_name[need], failed) for need in stage.needs
        )

    def _finish(self, stage: Stage) -> bool:
        """Run one stage to its end; False where the time is over, and what was done is kept."""
        folder = self.folder / stage.name
        try:
            found = list(getattr(self, f"_{stage.kind}")(stage, folder))
        except OutOfTime:
            return False
        with atomic_path(folder / RECORDS) as name:
            Path(name).write_text("".join(one.to_json() + "\n" for one in found), encoding="utf-8")
        if self.json_path is not None:
            append_records(self.json_path, found)
        (folder / "state.pt").unlink(missing_ok=True)
        return True

    def records(self) -> list[Record]:
        """The records of all stages that are done, of other calls' finalists, too."""
        trained = tuple(one.name for one in self.methods.values() if one.trains)
        return [
            one
            for stage in stages(self.size, trained)
            if self.is_done(stage.name)
            for one in read_records(self.folder / stage.name / RECORDS)
        ]

    # Stages
    # ----------------------------------------------------------------------------------------------------

    def _prepare(self, stage: Stage, folder: Path) -> Iterator[Record]:
        self.corpus.prepare()
        for split in ("val", "test"):
            measure.windows(self.corpus, self.size, split)  # said now, not after the first training
        yield from ()

    def _cost(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """Time and cache of every method and size, which do not depend on weights; measured in one
        stage, so that no other stage is beside some of them on a GPU."""
        model, cca = self._new(stage.seed).eval(), self.methods["cca"]
        known = [(one, "methods") for one in self.methods.values()]
        known += [
            (cca._replace(config=cca.config.replace(group_size=g, window_size=s)), "sizes")
            for g, s in sizes_of(self.size)
        ]
        with progress("time and cache", len(known)) as advance:
            for method, what in known:
                with attention(model, method.config):
                    seconds, held = measure.time_and_cache(model, self.size, self.device)
                yield self._record(
                    "model.first_token_s",
                    seconds if len(seconds) > 1 else seconds[0],
                    method,
                    stage,
                    of=what,
                )
                yield self._record("model.cache_bytes", held, method, stage, of=what)
                advance(1)

    def _tune(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """A short training from scratch with one rate, for choosing the rate on validation text."""
        method = self._method(stage)
        model = self._new(stage.seed)
        with attention(model, method.config):
            self._train(
                model, method, self.size.tune_levels, self.size.step_tokens, stage.lr, stage, folder
            )
            yield from self._perplexity(model, method, stage, ("val",), lr=stage.lr)

    def _scratch(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """A model that never had another attention, with the best of the rates tried, followed on
        validation text.

        A full-attention model is the base of every adaptation; its weights before the longest
        context are kept, too.
        """
        method, levels = self._method(stage), self.size.levels
        tries = [
            one
            for name in stage.needs
            for one in read_records(self.folder / name / RECORDS)
            if one.params.get("bucket") == "all"
        ]
        lr = min(tries, key=lambda one: one.value).params["lr"]
        model = self._new(stage.seed)
        is_base = method.config is None

        def keep(length: int) -> None:
            if is_base and len(levels) > 1 and length == levels[-2][0]:
                self._save(model, folder / "short.pt")

        def follow(step: int) -> dict[str, float]:
            if step % self.size.follow_steps:
                return {}
            model.eval()
            nll = measure.window_nll(
                model, self.corpus, self.size, "val", self.device, self.size.eval_tokens // 8
            )
            model.train()
            return {
                "val": round(float(nll.mean()), 5),
                "val_far": round(float(self._far(nll).mean()), 5),
            }

        with attention(model, method.config):
            self._train(
                model,
                method,
                levels,
                self.size.step_tokens,
                lr,
                stage,
                folder,
                on_level=keep,
                on_step=follow,
            )
            if is_base:
                self._save(model, folder / "weights.pt")
            yield from self._measure(model, method, stage, folder, lr=lr)

    def _layers(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """The layers and KV heads of a base model that need small groups, the neediest first."""
        model, size = self._load(f"{base_of(self.size, stage.seed)}/weights.pt").eval(), self.size
        shape, config = Shape(size.layers, size.kv_heads), self.methods["cca"].config
        wanted = [one.fine for one in self.methods.values() if one.fine is not None]
        most = {
            by: max(count for kind, count in wanted if (kind == "layers") == (by == "layers"))
            for by in ("layers", "heads")
        }

        def loss(units: tuple[Unit, ...]) -> float:
            sizes = spread(shape, units, 1, COARSE * config.group_size)
            with attention(model, config.replace(layer_group_sizes=sizes)):
                nll = measure.window_nll(
                    model, self.corpus, size, "val", self.device, size.eval_tokens // 8
                )
            return float(self._far(nll).mean(dtype=np.float64))

        by_layer = search_units([Unit(layer) for layer in range(size.layers)], most["layers"], loss)
        needy = sorted(by_layer.trials[: size.layers], key=lambda one: one.loss)[
            : max(2, size.layers // 4)
        ]
        by_head = search_units(
            [Unit(one.unit.layer, head) for one in needy for head in range(size.kv_heads)],
            most["heads"],
            loss,
        )
        trials = by_layer.trials + by_head.trials
        write_text(
            folder / LAYERS, json.dumps({"layers": by_layer.chosen, "heads": by_head.chosen}) + "\n"
        )
        params = {
            "model": size.name,
            "stage": stage.name,
            "seed": stage.seed,
            "length": size.length,
            "split": "val",
        }
        yield from layer_records(trials, params, device_name(self.device))

    def _adapt(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """From the base model to a method, all with the same batches, steps and rate."""
        method, size = self._method(stage), self.size
        short = bool(stage.sizes) or stage.kind == "short"
        model = self._load(
            f"{base_of(size, stage.seed)}/{'short' if stage.kind == 'short' else 'weights'}.pt"
        )
        teacher = copy.deepcopy(model).eval().requires_grad_(False) if method.distil else None
        steps = (size.short_steps if short else size.adapt_steps) * method.stretch
        if method.trains == "lora":
            add_lora(model, stage.seed)
        with attention(model, method.config):
            self._train(
                model,
                method,
                ((size.length, steps),),
                size.adapt_tokens,
                size.adapt_lr * method.rate,
                stage,
                folder,
                teacher=teacher,
            )
            if method.trains == "lora":
                merge_lora(model)
            if stage.name in (f"{name}-{size.seeds[0]}" for name in ("cca", "full")):
                self._save(model, folder / "weights.pt")
            yield from self._measure(model, method, stage, folder, brief=short)

    _short = _adapt

    def _zero(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """The base model under a method that it was never trained with."""
        model = self._load(f"{base_of(self.size, stage.seed)}/weights.pt").eval()
        method = self._method(stage)
        with attention(model, method.config):
            yield from self._measure(model, method, stage, folder)

    def _flexibility(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """One set of weights at other group and window sizes, untrained for them (paper 4.3)."""
        model, method = self._load(f"{stage.needs[0]}/weights.pt").eval(), self._method(stage)
        with attention(model, method.config):
            for g in self.size.groups:
                for s in self.size.windows:
                    handle_of(model).configure(group_size=g, window_size=s)
                    changed = method._replace(
                        config=method.config.replace(group_size=g, window_size=s)
                    )
                    yield from self._measure(model, changed, stage, folder, brief=True)

    def _cloze(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """Fixed-length choices with a constant number of groups (paper 3.6, C.3)."""
        for name in ("full", "cca"):
            model = self._load(f"{name}-{stage.seed}/weights.pt").eval()
            for groups in (0,) if name == "full" else (16, 64):
                method = self.methods[name]
                config = method.config and method.config.replace(num_groups=groups)
                with attention(model, config):
                    right = measure.cloze(model, self.corpus, self.size, self.device)
                g = group_size_for(self.size.length - 1, self.size.window, groups) if groups else 0
                yield self._record(
                    "quality.accuracy",
                    sum(right) / len(right),
                    method,
                    stage,
                    task="cloze",
                    questions=len(right),
                    **({"num_groups": groups, "group_size": g} if groups else {}),
                )

    def _maps(self, stage: Stage, folder: Path) -> Iterator[Record]:
        """Full attention's own weights on a held-out text."""
        model = self._load(f"{base_of(self.size, stage.seed)}/weights.pt").eval()
        ids = np.asarray(self.corpus.splits["test"][: min(512, self.size.length)], np.int64)
        found = measure.attention_weights(model, torch.from_numpy(ids)[None].to(self.device))
        with atomic_path(folder / "maps.npz") as name:
            np.savez(
                name,
                last=np.stack([one[:, -1] for one in found]),
                short=np.stack([one[:, :32, :32].mean(0) for one in found]),
                ids=ids,
            )
        for layer, one in enumerate(found):
            yield self._record(
                "quality.score",
                measure.top_mass(one),
                self.methods["full_zero"],
                stage,
                layer=layer,
                task="weight on the tenth of the keys that has most of it",
                tokens=len(ids),
            )

    # What stages share
    # -----------------------------------------------------------------------------------------

    def _method(self, stage: Stage) -> Method:
        method = self.methods[stage.method]
        if method.fine is not None:
            kind, count = method.fine
            found = json.loads(
                (self.folder / layers_of(self.size, stage.seed) / LAYERS).read_text(
                    encoding="utf-8"
                )
            )
            units = [Unit(*one) for one in found["layers" if kind == "layers" else "heads"][:count]]
            config = fine_config(self.size, kind, units)
            return method._replace(
                config=config
                if kind == "duo"
                else method.config.replace(layer_group_sizes=config.layer_group_sizes)
            )
        return (
            method._replace(config=method.config.replace(**dict(stage.sizes)))
            if stage.sizes
            else method
        )

    def _train(
        self,
        model: LlamaForCausalLM,
        method: Method,
        levels: tuple[tuple[int, int], ...],
        step_tokens: int,
        lr: float,
        stage: Stage,
        folder: Path,
        **more: Any,
    ) -> None:
        """Train, and keep the curve."""
        with Fused(model, "compile" if self.device.startswith("cuda") else None):
            history = train(
                model,
                self.corpus,
                method,
                levels,
                step_tokens,
                lr,
                stage.seed,
                self.device,
                folder,
                workers=self.workers,
                time_left=self.time_left,
                **more,
            )
        with atomic_path(folder / "curve.jsonl") as name:
            Path(name).write_text(
                "".join(json.dumps(one) + "\n" for one in thinned(history)), encoding="utf-8"
            )

    def _far(self, nll: np.ndarray) -> np.ndarray:
        """Of windows [n, L - 1], the second half."""
        return nll[:, self.size.length // 2 - 1 :]

    def _perplexity(
        self,
        model: LlamaForCausalLM,
        method: Method,
        stage: Stage,
        splits: tuple[str, ...],
        folder: Path | None = None,
        **params: Any,
    ) -> Iterator[Record]:
        """Of whole windows and of their far halves; each window's mean over its far half is kept in
        `folder`."""
        model.eval()
        for split in splits:
            nll = measure.window_nll(model, self.corpus, self.size, split, self.device)
            if folder is not None:
                with atomic_path(folder / f"far_{split}.npy") as name:
                    np.save(name, self._far(nll).mean(1))
            for bucket, part in (("all", nll), ("far", self._far(nll))):
                yield self._record(
                    "quality.perplexity",
                    math.exp(part.mean(dtype=np.float64)),
                    method,
                    stage,
                    task="text",
                    bucket=bucket,
                    windows=len(nll),
                    split=split,
                    **params,
                )

    def _measure(
        self,
        model: LlamaForCausalLM,
        method: Method,
        stage: Stage,
        folder: Path,
        brief: bool = False,
        **params: Any,
    ) -> Iterator[Record]:
        """Perplexity near and far, answers by distance and length."""
        size, reach = self.size, self.size.window + self.size.group
        padded = not isinstance(method.config, MInference)
        if brief:
            yield from self._perplexity(model, method, stage, ("test",), **params)
        else:
            yield from self._perplexity(model, method, stage, ("val", "test"), folder, **params)
        for length in (size.length,) if brief else [length for length, _ in size.levels]:
            rows = measure.fact_rows(self.corpus, length, size.questions)
            found = measure.answers_right(model, rows, self.device, padded)
            for distance, keep in (("all", lambda d: True), ("far", lambda d: d > reach)):
                some = [right for d, right in found if keep(d)]
                if some:
                    yield self._record(
                        "quality.accuracy",
                        sum(some) / len(some),
                        method,
                        stage,
                        task="retrieval",
                        distance=distance,
                        questions=len(some),
                        length=length,
                    )
        for documents in () if brief else size.documents:
            for task, rows in (
                ("multidoc_qa", measure.qa_rows(self.corpus, size, documents)),
                ("multidoc_planted", measure.planted_qa_rows(self.corpus, size, documents)),
            ):
                if not padded:  # one at a time, which takes long
                    rows = rows[: -(-len(rows) // 5)]
                if rows:
                    right = [
                        hit for _, hit in measure.answers_right(model, rows, self.device, padded)
                    ]
                    yield self._record(
                        "quality.accuracy",
                        sum(right) / len(right),
                        method,
                        stage,
                        task=task,
                        documents=documents,
                        questions=len(right),
                    )

    def _record(self, name: str, value: Any, method: Method, stage: Stage, **params: Any) -> Record:
        """A record with everything that tells this measurement from others."""
        config = (
            {}
            if method.config is None
            else {
                k: v
                for k, v in method.config.to_dict().items()
                if v not in (None, (), 0.0) and k not in ("backend", "patterns")
            }
        )
        return make_record(
            name,
            value,
            {
                "model": self.size.name,
                "method": method.name,
                "stage": stage.name,
                "seed": stage.seed,
                "length": self.size.length,
                **config,
                **params,
            },
            device=device_name(self.device),
        )

    def _save(self, model: LlamaForCausalLM, path: Path) -> None:
        """The weights in bfloat16, tied ones once: half the size to carry to another machine, and
        the same start for every method."""
        halves: dict[int, torch.Tensor] = {}
        state = {
            key: halves.setdefault(x.data_ptr(), x.to(torch.bfloat16))
            for key, x in model.state_dict().items()
        }
        with atomic_path(path) as name:
            torch.save(state, name)

    def _new(self, seed: int) -> LlamaForCausalLM:
        """A model with random weights."""
        return make_model(self.size, self.corpus.tokenizer.get_vocab_size(), seed).to(self.device)

    def _load(self, path: str) -> LlamaForCausalLM:
        """A model with the weights of an earlier stage."""
        if not (self.folder / path).exists():
            raise UserError(
                f"'{self.folder / path}' is needed and was left behind, though its stage is done. Remove "
                "the stage's folder to train it again."
            )
        model = self._new(0)
        model.load_state_dict(torch.load(self.folder / path, map_location="cpu", weights_only=True))
        return model
