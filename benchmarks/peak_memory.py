"""Measure the peak memory of a function in a fresh process.

The C allocator of that process returns every large block at once: memory kept from earlier work can
then neither hide an allocation nor count as one.
"""

import json
import subprocess
import sys
from typing import Any

from corecontext.measure import package_path

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Environment in which glibc returns large blocks to the system at once."""


def peak_bytes_in_subprocess(module: str, function: str, arguments: dict[str, Any]) -> int:
    """Return the peak bytes that `module.function(**arguments)` reports from a fresh process (see
    `corecontext.measure.PeakMemory`)."""
    code = (
        f"import json, sys; from {module} import {function} as measure; "
        "print(measure(**json.loads(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    environment = {**package_path(), **MALLOC}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if done.returncode < 0 or "memory" in last.lower():
            raise MemoryError(last)
        raise RuntimeError(f"measuring in a subprocess failed: {last}")
    return int(done.stdout.split()[-1])
