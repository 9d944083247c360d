"""The Ray deployment: arguments; two replicas on CPUs, one of which is killed under load."""

import os
import signal
import threading
import time

import pytest
from tiny_model import save_tiny_model

pytest.importorskip("ray")
openai = pytest.importorskip("openai")

from corecontext.files import UserError  # noqa: E402
from corecontext.serve.ray import app  # noqa: E402

PORT = 18765


def test_arguments_are_checked():
    for arguments, message in (
        ({"modle": "x"}, "unknown argument 'modle'"),
        ({"port": 1}, "unknown argument 'port'"),
        ({"max_replicas": "many"}, "max_replicas must be a number, got 'many'"),
        ({"cache_mib": "0"}, "cache-mib must be at least 1, got 0"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            app(arguments)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_replica_takes_only_its_own_requests_with_it(tmp_path):
    import ray
    from ray import serve
    from ray.util.state import list_actors

    model = save_tiny_model(tmp_path / "m", max_length=8192)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=True, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(
            app(
                {
                    "model": model,
                    "name": "tiny",
                    "device": "cpu",
                    "min_replicas": "2",
                    "max_replicas": 2,
                    "num_cpus": 0.5,
                    "cache_mib": 256,
                    "policy": "fixed",
                }
            )
        )
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=120
        )

        def replicas() -> dict[int, str]:
            return {
                actor.pid: actor.name
                for actor in list_actors(filters=[("state", "=", "ALIVE")])
                if actor.class_name.startswith("ServeReplica")
            }

        def ask(text: str, tokens: int, **options):
            return client.completions.create(
                model="tiny",
                prompt=text,
                max_tokens=tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
                **options,
            )

        assert client.models.list().data[0].id == "tiny" and len(replicas()) == 2
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="a", max_tokens=0)
        alone = {n: ask("abc" * n, 8).choices[0].text for n in range(1, 9)}
        assert "".join(p.choices[0].text for p in ask("abc", 8, stream=True)) == alone[1]

        begun, outcome = threading.Barrier(17, timeout=200), {}

        def long(number: int) -> None:
            stream = ask("abc" * number, 3000, stream=True)
            first = next(stream)
            begun.wait()
            try:
                last = list(stream)[-1]
                outcome[number] = first.system_fingerprint, last.choices[0].finish_reason
            except Exception as error:
                outcome[number] = first.system_fingerprint, error

        threads = [threading.Thread(target=long, args=(number,)) for number in range(1, 17)]
        for thread in threads:
            thread.start()
        begun.wait()
        victim = next(iter(replicas()))
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert len(outcome) == 16  # nobody waits for an answer that will not come
        lost = {replica for replica, end in outcome.values() if end != "length"}
        kept = [end for replica, end in outcome.values() if replica not in lost]
        assert len(lost) == 1 and kept and set(kept) == {"length"}
        errors = [end for replica, end in outcome.values() if replica in lost]
        assert all(isinstance(error, openai.APIError) for error in errors), errors

        deadline = time.monotonic() + 120
        while len(replicas()) < 2 or victim in replicas():
            assert time.monotonic() < deadline, "no replacement came"
            time.sleep(0.5)
        seen = set()
        while len(seen) < 2:  # both answer, the new one too, and with the same tokens
            assert time.monotonic() < deadline
            answers = [ask("abc" * n, 8) for n in alone]
            assert [answer.choices[0].text for answer in answers] == list(alone.values())
            seen |= {answer.system_fingerprint for answer in answers}
    finally:
        serve.shutdown()
        ray.shutdown()
