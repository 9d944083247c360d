"""Measure vLLM under several methods in turns: each has a process and a part of the GPU's memory,
and waits while another one reads a prompt."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from benchmarks.vllm import VllmBench, bench_of, check_installed, hand_over, started
from corecontext.files import UserError
from corecontext.measure import package_path
from corecontext.record import Record, command_line

READY = "ready for the next turn"
"""What a process prints when it has done what it was asked."""
KEEP = "keep"
"""Asks a process for its records; a number asks for a prompt of so many tokens."""
PROCESSORS = 2
"""Processors from which all methods launch."""
ENDING_S = 60
"""Seconds that a process has to end."""


class Turn:
    """Ask the process of a method."""

    def __init__(self, bench: VllmBench, method: str) -> None:
        self.method = method
        given = asdict(replace(bench, turns=False)) | {
            "methods": [method],
            "memory_share": bench.memory_share / len(bench.methods),
        }
        program = [sys.executable, "-m", "benchmarks.vllm_turns", json.dumps(given)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            program, env=package_path(), stdin=pipe, stdout=pipe, text=True
        )

    def ask(self, text: str) -> list[Record]:
        """Ask for something; return the records that the answer has.

        Raises:
            UserError: the process has ended.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its output tells
            print(text, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> list[Record]:
        """Wait until the process is ready; return its records."""
        assert self.process.stdout is not None
        records = []
        for line in self.process.stdout:
            if line.startswith('{"name"'):
                records.append(replace(Record.from_json(line), command=command_line()))
            if line.strip() == READY:
                return records
        code = self.process.wait()
        raise UserError(
            f"vllm must measure each method. {self.method}: vLLM ended with code {code}."
        )

    def end(self) -> None:
        """End the process, which asks for nothing more."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure_in_turns(bench: VllmBench, on_records: Callable[[list[Record]], Any]) -> list[Record]:
    """Start all methods one after another, measure each length by prompts in turns, in another
    order each round, and return the records.

    Raises:
        UserError: vLLM is not installed, or ended early with a method.
    """
    check_installed()
    shuffle = random.Random(bench.seed)
    records = []
    with contextlib.ExitStack() as stack:
        turns = []
        for method in bench.methods:
            turns.append(Turn(bench, method))
            stack.callback(turns[-1].end)
            turns[-1].answer()
        for length in bench.lengths:
            for _ in range(bench.trials):
                for turn in shuffle.sample(turns, len(turns)):
                    turn.ask(str(length))
        for turn in turns:
            new = turn.ask(KEEP)
            on_records(new)
            records += new
    return records


def take_turns(bench: VllmBench, asked: Iterable[str]) -> None:
    """Do what the lines of `asked` ask for, and print when each is done.

    All methods launch from the same processors, where the system allows it: those of a machine
    differ by what else they do.
    """
    [method] = bench.methods
    with started(bench, method, hand_over) as trial:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSORS])
        print(READY, flush=True)
        for line in asked:
            if line.strip() == KEEP:
                for length in bench.lengths:
                    trial.keep_alone(length)
            else:
                trial.alone(int(line))
            print(READY, flush=True)


if __name__ == "__main__":
    take_turns(bench_of(sys.argv[1]), sys.stdin)
