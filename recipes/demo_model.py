"""Make the model of `corecontext demo`: a small byte-level Llama that can retrieve, under full
attention and CCA.

Two stages, each with a time budget, on one GPU:
  full  Full attention, from 512 to 16K bytes of context. Real text, and text with planted facts and
        questions for them at the end. Contexts grow once the answers are right, because retrieval
        is learned at short contexts first.
  cca   The same data from 1K to 40K bytes; most steps run under CCA, every fourth under full
        attention, so that the same weights serve both.

    python recipes/demo_model.py --data DIR --out corecontext/assets/demo_model

DIR holds lm_train.jsonl.xz and lm_val.jsonl.xz. The stages can run apart: --stage full --out A,
then --stage cca --resume-from A --out B.
"""

import argparse
import contextlib
import json
import lzma
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from corecontext import CCAConfig, enabled
from corecontext.data.retrieval import KINDS, make_facts, plant
from corecontext.record import append_records, device_name, make_record

SOURCES = ("standardebooks", "eltec", "openstax", "peps")
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>"] + [f"<|reserved_{i}|>" for i in range(5)]
PAD, BOS, EOS = 256, 257, 258
DOCUMENT_END = 0  # in uint8 text, where the byte does not occur; the model sees EOS
PLAIN = str.maketrans(
    {
        "\u201c": '"',
        "\u201d": '"',
        "\u2018": "'",
        "\u2019": "'",
        "\u2014": "--",
        "\u2013": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\u2060": "",
        "\0": "",
    }
)
CCA = CCAConfig.paper(group_size=16, window_size=512)
FULL_STEP_EVERY = 4  # in the cca stage
ANSWERED = 0.97  # share of right answer bytes at which a context length ends
EVAL_LENGTHS = (1024, 4096, 16384, 36864)


@dataclass(frozen=True)
class Stage:
    """One stage of training."""

    minutes: float
    peak_lr: float
    lengths: tuple[tuple[int, float], ...]
    """Context lengths in bytes, each with the share of the stage's time by which it ends at the
    latest."""
    step_tokens: int = 131_072
    cca: bool = False


STAGES = {
    "full": Stage(2.7, 4e-3, ((512, 0.4), (1024, 0.6), (4096, 0.85), (16384, 1.0))),
    "cca": Stage(5.4, 3e-3, ((1024, 0.35), (4096, 0.6), (16384, 0.8), (40960, 1.0)), cca=True),
}
TINY = {
    name: Stage(0.3, 4e-3, ((256, 0.5), (1024, 1.0)), 4096, stage.cca)
    for name, stage in STAGES.items()
}


def load_text(path: Path) -> np.ndarray:
    """Return the chosen sources as uint8, with plain quotes and dashes, each document ending in
    DOCUMENT_END."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        documents = [
            d["text"].translate(PLAIN) for d in map(json.loads, lines) if d["source"] in SOURCES
        ]
    return np.frombuffer(b"".join(d.encode() + bytes([DOCUMENT_END]) for d in documents), np.uint8)


def task_row(
    text: np.ndarray, rng: random.Random, length: int, only_list: bool
) -> tuple[np.ndarray, list]:
    """Return a sequence of `length` bytes that ends with questions, and the places of their
    answers: (start, end, kind).

    Facts are planted in real text, or (`only_list`) follow one another.
    """
    most = min(160, length // 140) if only_list else min(48, length // 200)
    most = max(1, most)
    facts = make_facts(rng, rng.sample(KINDS, len(KINDS)), rng.randint(max(1, most // 3), most))
    asked = rng.sample(facts, len(facts))
    tail = ""
    spans = []
    for fact in asked:
        tail += fact.prompt
        spans.append((len(tail) + 1, len(tail) + len(fact.completion), fact.kind))
        tail += fact.completion
    planted = "\n".join(fact.sentence for fact in facts)
    room = length - len(tail) - len(planted) - len(facts)
    if not only_list:
        start = rng.randrange(len(text) - room)
        body = text[start : start + room].tobytes().decode("utf-8", "ignore").replace("\0", "")
        planted = plant(body, facts, [rng.random() for _ in facts]).rstrip("\n")
        planted += "\n" * rng.randrange(2)
    row = np.frombuffer((planted + tail).encode()[-length:], np.uint8)
    start = rng.randrange(len(text) - length)
    filler = text[start : start + length - len(row)]  # other text, before the facts
    offset = length - len(tail)
    return np.concatenate((filler, row)), [(a + offset, b + offset, kind) for a, b, kind in spans]


def task_batch(
    text: np.ndarray, rng: random.Random, length: int, rows: int, list_share: float
) -> tuple[Tensor, Tensor]:
    """Return rows of `task_row`, and weights with which a row's answers count half as much as its
    whole text."""
    tokens = np.empty((rows, length), np.uint8)
    weights = np.ones((rows, length), np.uint8)
    for i in range(rows):
        tokens[i], spans = task_row(text, rng, length, rng.random() < list_share)
        weight = 0.5 * length / sum(b - a for a, b, _ in spans)
        for a, b, _ in spans:
            weights[i, a:b] = round(min(max(weight, 4), 100))
    return torch.from_numpy(tokens), torch.from_numpy(weights)


class Tasks(torch.utils.data.IterableDataset):
    """An endless stream of task batches, made in worker processes."""

    def __init__(
        self, text: np.ndarray, length: int, rows: int, list_share: float, seed: int
    ) -> None:
        self.text = text
        self.args = (length, rows, list_share)
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}-{worker.id if worker else 0}-{self.args}")
        while True:
            yield task_batch(self.text, rng, *self.args)


def to_ids(tokens: Tensor) -> Tensor:
    """Return uint8 text as token ids, with EOS for document ends, and BOS instead of each row's
    first byte."""
    ids = tokens.long()
    ids[ids == DOCUMENT_END] = EOS
    ids[:, 0] = BOS
    return ids


def make_model() -> LlamaForCausalLM:
    """Return a new model of 6.0 M parameters."""
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with bytes as tokens 0 to 255, then the special tokens."""
    byte_to_char = _byte_characters()
    tokenizer = Tokenizer(models.BPE({byte_to_char[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        model_max_length=65536,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> dict[int, str]:
    """Return the printable character that byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def nll_of(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood in nats of every token but the first, and whether it was
    the most likely token."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return _head(model.lm_head.weight, hidden, ids[:, 1:])


def _head(weight: Tensor, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight).float()
    nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return nll.view(target.shape), logits.argmax(-1) == target


def attention(model: LlamaForCausalLM, method: str) -> contextlib.AbstractContextManager:
    """Return a context in which the model has "full" or "cca" attention."""
    return enabled(model, CCA) if method == "cca" else contextlib.nullcontext()


def autocast(device: str) -> contextlib.AbstractContextManager:
    """Return a context of bfloat16 arithmetic on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    matrix_ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in matrix_ids]
    result = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in (g for o in result for g in o.param_groups):
        group["peak"] = lr
    return result


def lr_factor(progress: float, step: int, final: bool) -> float:
    """Return the factor of the peak learning rate: a linear warm-up of 100 steps, then a cosine to
    0.3 before another stage, to 0.02 at the end."""
    floor = 0.02 if final else 0.3
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / 100) * (floor + (1 - floor) * cosine)


def train(
    model: LlamaForCausalLM, text: np.ndarray, stage: Stage, device: str, seed: int, workers: int
) -> dict[str, Any]:
    """Train for the stage's time; return the steps and tokens done, by context length."""
    model.train()
    if device == "cuda":
        for layer in model.model.layers:
            for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                module.compile(dynamic=True)
    on_device = torch.from_numpy(text.copy()).to(device)
    opts = optimizers(model, stage.peak_lr)
    start = time.time()
    budget = 60 * stage.minutes
    step = 0
    tokens = 0
    done = []
    for length, latest in stage.lengths:
        rows = max(2, stage.step_tokens // length)
        rows_text = max(1, rows * 2 // 5)
        list_share = 0.5 if length <= 1024 else 0.2
        loader = iter(
            torch.utils.data.DataLoader(
                Tasks(text, length, rows - rows_text, list_share, seed),
                batch_size=None,
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
            )
        )
        first_step = step
        first_time = shown = time.time()
        right = {"full": 0.0, "cca": 0.0}
        is_last = length == stage.lengths[-1][0]
        while (elapsed := time.time() - start) < latest * budget:
            # A batch: rows with questions, whose answers weigh more, and plain text.
            method = "cca" if stage.cca and step % FULL_STEP_EVERY else "full"
            task, weight = next(loader)
            starts = torch.randint(len(text) - length, (rows_text, 1), device=device)
            plain = on_device[starts + torch.arange(length, device=device)]
            ids = to_ids(torch.cat((task.to(device), plain)))
            weight = torch.cat((weight.to(device), torch.ones_like(plain)))[:, 1:].float()
            with attention(model, method), autocast(device):
                nll, hit = nll_of(model, ids)
                loss = (nll * weight).sum() / weight.sum()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in (g for o in opts for g in o.param_groups):
                group["lr"] = group["peak"] * lr_factor(elapsed / budget, step, stage.cca)
            for o in opts:
                o.step()
                o.zero_grad(set_to_none=True)
            step += 1
            tokens += ids.numel()
            # Read the results seldom, because that waits for the GPU.
            if step % 10 < (2 if stage.cca else 1):
                answer = weight > 1
                right[method] += 0.2 * (hit[answer].float().mean().item() - right[method])
                if time.time() - shown > 15:
                    shown = time.time()
                    bits = nll[-rows_text:].mean().item() / math.log(2)
                    rate = (step - first_step) * rows * length / (time.time() - first_time)
                    print(
                        f"{elapsed:5.0f} s  step {step:5d}  length {length:5d}  {method:4s}  "
                        f"{bits:.3f} bits/byte  answer bytes right: full {right['full']:.3f} "
                        f"cca {right['cca']:.3f}  {rate / 1e6:.2f} M tokens/s",
                        flush=True,
                    )
                lowest = min(right.values()) if stage.cca else right["full"]
                if lowest > ANSWERED and not is_last:
                    break
        done.append(
            {
                "length": length,
                "steps": step - first_step,
                "seconds": round(time.time() - first_time),
                "answer_bytes_right": {k: round(v, 3) for k, v in right.items()},
            }
        )
        print(f"length {length} done: {done[-1]}", flush=True)
        del loader
    return {
        "stage": "cca" if stage.cca else "full",
        "steps": step,
        "tokens": tokens,
        "peak_lr": stage.peak_lr,
        "seconds": round(time.time() - start),
        "device": device_name(device),
        "lengths": done,
    }


@torch.inference_mode()
def evaluate(
    model: LlamaForCausalLM,
    text: np.ndarray,
    device: str,
    lengths: tuple[int, ...],
    questions: int = 240,
) -> list[dict[str, Any]]:
    """Return exact match of answers by length, method and kind, and bits per byte of plain text.

    An answer is right if each of its bytes and the full stop is the most likely one, as in greedy
    decoding.
    """

    def score(row: np.ndarray) -> tuple[Tensor, Tensor]:
        nll, hit = nll_of(model, to_ids(torch.from_numpy(row.copy())[None]).to(device))
        return nll, hit[0].cpu()

    model.eval()
    results = []
    for length in lengths:
        rng = random.Random(f"eval-{length}")
        rows: list[tuple[np.ndarray, list]] = []
        while sum(len(spans) for _, spans in rows) < questions:
            rows.append(task_row(text, rng, length, only_list=False))
        starts = [rng.randrange(len(text) - length) for _ in range(max(2, 131072 // length))]
        plain = [text[start : start + length] for start in starts]
        for method in ("full", "cca"):
            right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
            with attention(model, method), autocast(device):
                for row, spans in rows:
                    _, hit = score(row)
                    for a, b, kind in spans:
                        right[kind].append(bool(hit[a - 1 : b - 1].all()))
                bits = [score(row)[0].mean().item() / math.log(2) for row in plain]
            results.append(
                {
                    "length": length,
                    "method": method,
                    "bits_per_byte": sum(bits) / len(bits),
                    "count": {k: len(v) for k, v in right.items()},
                    "accuracy": {k: sum(v) / max(1, len(v)) for k, v in right.items()},
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def save(
    model: LlamaForCausalLM, out: Path, history: list[dict[str, Any]], results: list[dict[str, Any]]
) -> None:
    """Write weights in bfloat16, settings, tokenizer, the training's history and the model card."""
    copy = make_model()
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16)
    copy.config.dtype = torch.bfloat16
    copy.generation_config.do_sample = False
    if history[-1]["stage"] == "cca":
        copy.config.cca = CCA.to_dict()
    copy.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    (out / "training.json").write_text(
        json.dumps({"stages": history, "evaluation": results}, indent=1) + "\n"
    )
    (out / "README.md").write_text(model_card(history, results))


CARD = """\
---
license: cc-by-4.0
language: en
library_name: transformers
---

# The model of `corecontext demo`

{intro}

Made by `python recipes/demo_model.py --data DIR --out corecontext/assets/demo_model`.

| stage | steps x bytes of context | tokens | time | peak learning rate | device |
|---|---|---|---|---|---|
{stages}

{validation}

| context, bytes | attention | {kinds} | bits per byte |
|---|---|{rules}---|
{rows}

## Data

{data}
"""
INTRO = (
    "A byte-level Llama of 6.0 M parameters that finds planted facts, under full attention and "
    f"under CCA (g = {CCA.group_size}, s = {CCA.window_size}) at the same weights. It exists to "
    "show the machinery: its prose is poor, and it answers questions only in the form it was "
    "trained on (`corecontext/data/retrieval.py`)."
)
VALIDATION = (
    "Validation: exact match of answers to questions at the end of held-out text, by kind of fact, "
    "and bits per byte of plain held-out text. Facts stand at uniform depths, so at 1024 many lie "
    "within the window."
)
DATA = (
    "Synthetic facts, and English text of four sources: Standard Ebooks (CC0-1.0), ELTeC-eng "
    "(public-domain novels; markup CC BY 4.0), OpenStax textbooks (CC BY 4.0, "
    "https://openstax.org) and Python Enhancement Proposals (public domain or CC0-1.0). Documents "
    "of the validation and test splits were left out, among them the demo's document. Typographic "
    "quotes and dashes were made plain."
)


def model_card(history: list[dict[str, Any]], results: list[dict[str, Any]]) -> str:
    """Return the README of the model's folder; every number comes from this run."""
    rows = []
    for result in results:
        accuracies = " | ".join(f"{result['accuracy'][kind]:.1%}" for kind in KINDS)
        bits = f"{result['bits_per_byte']:.3f}"
        rows.append(f"| {result['length']} | {result['method']} | {accuracies} | {bits} |")
    stages = []
    for stage in history:
        steps = ", ".join(f"{run['steps']} x {run['length']}" for run in stage["lengths"])
        stages.append(
            f"| {stage['stage']} | {steps} | {stage['tokens'] / 1e6:.0f} M | {stage['seconds']} s "
            f"| {stage['peak_lr']} | {stage['device']} |"
        )
    return CARD.format(
        intro=INTRO,
        stages="\n".join(stages),
        validation=VALIDATION,
        kinds=" | ".join(KINDS),
        rules="---|" * len(KINDS),
        rows="\n".join(rows),
        data=DATA,
    )


def write_records(path: str, results: list[dict[str, Any]], device: str) -> None:
    """Append the evaluation to a results file."""
    records = []
    for r in results:
        params = {
            "model": "demo_model",
            "method": r["method"],
            "length": r["length"],
            "dtype": "bfloat16",
            "group_size": CCA.group_size,
            "window_size": CCA.window_size,
        }
        if r["method"] == "full":
            params = {k: v for k, v in params.items() if k not in ("group_size", "window_size")}
        name = device_name(device)
        records.append(
            make_record(
                "quality.bits_per_byte", r["bits_per_byte"], {**params, "task": "text"}, device=name
            )
        )
        records += [
            make_record(
                "quality.accuracy",
                r["accuracy"][kind],
                {**params, "task": f"retrieval-{kind}", "questions": r["count"][kind]},
                device=name,
            )
            for kind in KINDS
        ]
    append_records(path, records)


def main() -> None:
    """Train the chosen stages, evaluate and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with lm_train.jsonl.xz and lm_val.jsonl.xz"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder that the model is written to"
    )
    parser.add_argument("--stage", choices=("all", *STAGES), default="all")
    parser.add_argument(
        "--resume-from", type=Path, help="folder of a model that the stage starts from"
    )
    parser.add_argument("--minutes", type=float, help="time of each stage, instead of its own")
    parser.add_argument("--results", help="JSON lines file to append the evaluation to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument(
        "--tiny", action="store_true", help="seconds instead of minutes, to try the script on a CPU"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    text = load_text(args.data / "lm_train.jsonl.xz")
    val = load_text(args.data / "lm_val.jsonl.xz")
    print(f"{len(text) / 1e6:.1f} MB of text, {len(val) / 1e6:.1f} MB for validation", flush=True)
    history: list[dict[str, Any]] = []
    if args.resume_from:
        model = AutoModelForCausalLM.from_pretrained(args.resume_from, dtype=torch.float32)
        history = json.loads((args.resume_from / "training.json").read_text())["stages"]
    else:
        model = make_model()
    model.to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    for name in STAGES if args.stage == "all" else (args.stage,):
        stage = (TINY if args.tiny else STAGES)[name]
        if args.minutes:
            stage = Stage(args.minutes, stage.peak_lr, stage.lengths, stage.step_tokens, stage.cca)
        history.append(train(model, text, stage, device, args.seed + len(history), args.workers))
        save(model, args.out, history, [])
    results = evaluate(model, val, device, EVAL_LENGTHS[:1] if args.tiny else EVAL_LENGTHS)
    save(model, args.out, history, results)
    if args.results:
        write_records(args.results, results, device)


if __name__ == "__main__":
    main()
