"""Make the model of `corecontext demo`: a small byte-level Llama that can retrieve, under full
attention and CCA.

Two stages, each with a time budget, on one GPU:
  full  full attention, from 512 to 16K bytes of context. Real text, and text with facts planted in
        it that are asked for at the end. Contexts grow once the answers are right, because
        retrieval is learned at short contexts first. cca   the same data from 1K to 40K bytes; most
        steps run under CCA, every fourth under full attention, so that the same weights serve both.

    python recipes/demo_model.py --data DIR --out corecontext/assets/demo_model

DIR holds lm_train.jsonl.xz and lm_val.jsonl.xz. The stages can run apart: --stage full --out A,
then
--stage cca --resume-from A --out B.
"""

from __future__ import annotations

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
CCA = CCAConfig(group_size=16, window_size=512)
FULL_STEP_EVERY = 4  # in the cca stage
ANSWERED = 0.97  # share of answer bytes at which a context length is done with
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
    """The chosen sources as uint8, typographic quotes and dashes made plain, documents ending in
    DOCUMENT_END."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        documents = [
            d["text"].translate(PLAIN) for d in map(json.loads, lines) if d["source"] in SOURCES
        ]
    return np.frombuffer(b"".join(d.encode() + bytes([DOCUMENT_END]) for d in documents), np.uint8)


def task_row(
    text: np.ndarray, rng: random.Random, length: int, only_list: bool
) -> tuple[np.ndarray, list]:
    """One sequence of `length` bytes that ends with questions, and where their answers are: (start,
    end, kind).

    Facts stand in real text, or (`only_list`) one after the other with nothing between.
    """
    most = max(1, min(160, length // 140) if only_list else min(48, length // 200))
    facts = make_facts(rng, rng.sample(KINDS, len(KINDS)), rng.randint(max(1, most // 3), most))
    asked = rng.sample(facts, len(facts))
    tail, spans = "", []
    for fact in asked:
        tail += fact.prompt
        spans.append((len(tail) + 1, len(tail) + len(fact.completion), fact.kind))
        tail += fact.completion
    planted = "\n".join(fact.sentence for fact in facts)
    room = length - len(tail) - len(planted) - len(facts)
    if not only_list:
        start = rng.randrange(len(text) - room)
        body = text[start : start + room].tobytes().decode("utf-8", "ignore").replace("\0", "")
        planted = plant(body, facts, [rng.random() for _ in facts]).rstrip(
            "\n"
        ) + "\n" * rng.randrange(2)
    row = np.frombuffer((planted + tail).encode()[-length:], np.uint8)
    offset = len(row) - len(tail)
    filler = text[
        (at := rng.randrange(len(text) - length)) : at + length - len(row)
    ]  # other text before it all
    offset += len(filler)
    return np.concatenate((filler, row)), [(a + offset, b + offset, kind) for a, b, kind in spans]


def task_batch(
    text: np.ndarray, rng: random.Random, length: int, rows: int, list_share: float
) -> tuple[Tensor, Tensor]:
    """Rows of `task_row`, and weights that make a row's answers count half as much as its whole
    text."""
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
        self.args, self.seed = (length, rows, list_share), seed
        self.text = text

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}-{worker.id if worker else 0}-{self.args}")
        while True:
            yield task_batch(self.text, rng, *self.args)


def to_ids(tokens: Tensor) -> Tensor:
    """uint8 text as token ids, document ends as EOS, each row beginning with BOS in the place of
    its first byte."""
    ids = tokens.long()
    ids[ids == DOCUMENT_END] = EOS
    ids[:, 0] = BOS
    return ids


def make_model() -> LlamaForCausalLM:
    """The architecture: 6.0 M parameters."""
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
    """Bytes as tokens 0 to 255, then the special tokens."""
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
    """The printable character that byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def nll_of(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood in nats of every token but the first, and whether it was the most
    likely one."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return _head(model.lm_head.weight, hidden, ids[:, 1:])


def _head(weight: Tensor, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight).float()
    nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(
        target.shape
    )
    return nll, logits.argmax(-1) == target


def attention(model: LlamaForCausalLM, method: str) -> contextlib.AbstractContextManager:
    """The model under "full" or "cca" attention."""
    return enabled(model, CCA) if method == "cca" else contextlib.nullcontext()


def autocast(device: str) -> contextlib.AbstractContextManager:
    """bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    found = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in (g for o in found for g in o.param_groups):
        group["peak"] = lr
    return found


def lr_factor(progress: float, step: int, final: bool) -> float:
    """Warm-up over 100 steps, then a cosine: to 30 % where another stage follows, to 2 % at the
    end."""
    floor = 0.02 if final else 0.3
    return min(1.0, (step + 1) / 100) * (
        floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    )


def train(
    model: LlamaForCausalLM, text: np.ndarray, stage: Stage, device: str, seed: int, workers: int
) -> dict[str, Any]:
    """Train for the stage's time; returns what was done."""
    model.train()
    if device == "cuda":
        for layer in model.model.layers:
            for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                part.compile(dynamic=True)
    on_device = torch.from_numpy(text.copy()).to(device)
    opts = optimizers(model, stage.peak_lr)
    start, step, tokens, done = time.time(), 0, 0, []
    budget = 60 * stage.minutes
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
        first_step, right, last = step, {"full": 0.0, "cca": 0.0}, length == stage.lengths[-1][0]
        first_time = shown = time.time()
        while (elapsed := time.time() - start) < latest * budget:
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
            step, tokens = step + 1, tokens + ids.numel()
            if step % 10 < (2 if stage.cca else 1):  # seldom, because reading it waits for the GPU
                answer = weight > 1
                right[method] += 0.2 * (hit[answer].float().mean().item() - right[method])
                if time.time() - shown > 15:
                    shown = time.time()
                    bits = nll[-rows_text:].mean().item() / math.log(2)
                    rate = (step - first_step) * rows * length / (time.time() - first_time)
                    print(
                        f"{elapsed:5.0f} s  step {step:5d}  length {length:5d}  {method:4s}  {bits:.3f} bits/byte  "
                        f"answer bytes right: full {right['full']:.3f} cca {right['cca']:.3f}"
                        f"  {rate / 1e6:.2f} M tokens/s",
                        flush=True,
                    )
                if min(right.values() if stage.cca else [right["full"]]) > ANSWERED and not last:
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
    """Exact match of answers by length, method and kind, and bits per byte of plain text.

    An answer is right if each of its bytes and the full stop is the most likely one, which is when
    greedy decoding would give it.
    """
    model.eval()
    results = []
    for length in lengths:
        rng = random.Random(f"eval-{length}")
        rows: list[tuple[np.ndarray, list]] = []
        while sum(len(spans) for _, spans in rows) < questions:
            rows.append(task_row(text, rng, length, only_list=False))
        plain = [
            text[(a := rng.randrange(len(text) - length)) : a + length]
            for _ in range(max(2, 131072 // length))
        ]
        for method in ("full", "cca"):
            right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
            with attention(model, method), autocast(device):
                for row, spans in rows:
                    hit = nll_of(model, to_ids(torch.from_numpy(row.copy())[None]).to(device))[1][
                        0
                    ].cpu()
                    for a, b, kind in spans:
                        right[kind].append(bool(hit[a - 1 : b - 1].all()))
                bits = [
                    nll_of(model, to_ids(torch.from_numpy(x.copy())[None]).to(device))[0]
                    .mean()
                    .item()
                    / math.log(2)
                    for x in plain
                ]
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
    """Weights in bfloat16, settings, tokenizer, what was done, and the model card."""
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


def model_card(history: list[dict[str, Any]], results: list[dict[str, Any]]) -> str:
    """The README of the model's folder; every number comes from this run."""
    rows = [
        f"| {r['length']} | {r['method']} | "
        + " | ".join(f"{r['accuracy'][k]:.1%}" for k in KINDS)
        + f" | {r['bits_per_byte']:.3f} |"
        for r in results
    ]
    stages = [
        f"| {h['stage']} | "
        + ", ".join(f"{x['steps']} x {x['length']}" for x in h["lengths"])
        + f" | {h['tokens'] / 1e6:.0f} M | {h['seconds']} s | {h['peak_lr']} | {h['device']} |"
        for h in history
    ]
    return "\n".join(
        [
            "---",
            "license: cc-by-4.0",
            "language: en",
            "library_name: transformers",
            "---",
            "",
            "# The model of `corecontext demo`",
            "",
            f"A byte-level Llama of 6.0 M parameters that finds planted facts, under full attention and under CCA "
            f"(g = {CCA.group_size}, s = {CCA.window_size}) at the same weights. It exists to show the machinery: its prose"
            " is poor, and it answers questions only in the form it was trained on (`corecontext/data/retrieval.py`).",
            "",
            "Made by `python recipes/demo_model.py --data DIR --out corecontext/assets/demo_model`.",
            "",
            "| stage | steps x bytes of context | tokens | time | peak learning rate | device |",
            "|---|---|---|---|---|---|",
            *stages,
            "",
            "Validation: exact match of answers to questions at the end of held-out text, by kind of fact, and bits per "
            "byte of plain held-out text. Facts stand at uniform depths, so at 1024 many lie within the window.",
            "",
            "| context, bytes | attention | " + " | ".join(KINDS) + " | bits per byte |",
            "|---|---|" + "---|" * len(KINDS) + "---|",
            *rows,
            "",
            "## Data",
            "",
            "Synthetic facts, and English text of four sources: Standard Ebooks (CC0-1.0), ELTeC-eng (public-domain "
            "novels; markup CC BY 4.0), OpenStax textbooks (CC BY 4.0, https://openstax.org) and Python Enhancement "
            "Proposals (public domain or CC0-1.0). Documents of the validation and test splits were left out, among them "
            "the demo's document. Typographic quotes and dashes were made plain.",
            "",
        ]
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
    """Train the stages asked for, evaluate, save."""
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
    text, val = load_text(args.data / "lm_train.jsonl.xz"), load_text(args.data / "lm_val.jsonl.xz")
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
