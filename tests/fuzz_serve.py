"""Fuzz a server from its own OpenAPI schema for as long as asked: no 500, and answers that the
schema knows.

    python tests/fuzz_serve.py --minutes 10

Schemathesis makes requests that fit the schema and requests that do not, seed after seed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from served import KEY, Served
from tiny_model import save_tiny_model

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,ignored_auth"
)


def main() -> int:
    """Run; 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny_model(folder / "m", max_length=128)
        server = Served(
            folder / "log",
            "--model",
            model,
            "--name",
            "tiny",
            "--time-limit",
            "30",
            "--cache-mib",
            "100",
        )
        end, seed, bad = time.monotonic() + 60 * options.minutes, options.seed, 0
        try:
            while time.monotonic() < end:
                found = subprocess.run(
                    [
                        str(Path(sys.executable).parent / "schemathesis"),
                        "run",
                        server.url + "/openapi.json",
                        "--header",
                        f"Authorization: Bearer {KEY}",
                        "--checks",
                        CHECKS,
                        "--max-examples",
                        "60",
                        "--seed",
                        str(seed),
                        "--request-timeout",
                        "60",
                        "--generation-database",
                        "none",
                        "--phases",
                        "examples,coverage,fuzzing",
                        "--no-color",
                    ],
                    cwd=folder,
                    text=True,
                    capture_output=True,
                )
                print(f"seed {seed}: exit {found.returncode}", flush=True)
                if found.returncode:
                    bad += 1
                    print(
                        found.stdout.partition("FAILURES")[2][:8000],
                        found.stderr[-2000:],
                        flush=True,
                    )
                assert server.process.poll() is None, server.log.read_text()[-2000:]
                seed += 1
            errors = server.gauge('corecontext_refused_total{status="5') + server.gauge(
                'corecontext_requests_total{outcome="error"}'
            )
            answered = server.gauge("corecontext_requests_total")
            refused = server.gauge("corecontext_refused_total")
            running = server.gauge("corecontext_running")
            print(
                f"{answered:.0f} answered, {refused:.0f} refused, {errors:.0f} errors inside, "
                f"{running:.0f} running, "
                f"{bad} runs with findings"
            )
            return 1 if bad or errors or running else 0
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())
