"""The page of a server: its HTTP, the bytes that it shows, and itself in a browser where there is
one."""

import contextlib
import shutil
import socket
import subprocess
import threading
import time

import pytest

pytest.importorskip("fastapi")
httpx, uvicorn = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")

from served import Asgi  # noqa: E402
from tiny_model import save_tiny_model  # noqa: E402

KEY = "a-key-of-the-test"
DRIVER = shutil.which("chromedriver")
BROWSER = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_length=512)


@pytest.fixture(scope="module")
def tiny(folder):
    served = Asgi(folder, api_key=KEY)
    yield served
    served.worker.stop()


def test_the_page_loads_nothing_and_is_off_with_an_option(folder, tiny):
    page = tiny.ask(("GET", "/", {}))[0]
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert KEY not in page.text and "http" not in page.text
    assert "/" not in tiny.app.openapi()["paths"]
    hidden = Asgi(folder, start=False, page=False)
    assert hidden.ask(("GET", "/", {}))[0].status_code == 404


def test_usage_tells_the_bytes_of_the_cache(tiny):
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": "tiny", "prompt": ["abc" * 50, "abc"], "max_tokens": 10, "ignore_eos": True}
    answer = tiny.ask(("POST", "/v1/completions", {"json": body, "headers": headers}))[0].json()
    shape, config = tiny.scheduler.memory.shape, tiny.loaded.config
    compact, full = (
        sum(shape.bytes_of(setting, length).device for length in (160, 13))
        for setting in (config, None)
    )
    expected = {"device": compact, "host": 0, "full_attention": full}
    assert answer["usage"]["cache_bytes"] == expected
    assert tiny.loaded.config.fetch_groups == 0 and compact < full
    card = tiny.ask(("GET", "/v1/models", {"headers": headers}))[0].json()["data"][0]
    assert card["has_chat_template"] is False


class Page:
    """A page in Chromium, by the WebDriver protocol."""

    def __init__(self, driver: str) -> None:
        options = {"args": [*BROWSER, "--window-size=390,844"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        body = {"capabilities": {"alwaysMatch": wanted}}
        answer = httpx.post(f"{driver}/session", json=body, timeout=60).json()["value"]
        self.url = f"{driver}/session/{answer['sessionId']}"

    def call(self, path: str, **body):
        """Send a command; return its value."""
        answer = httpx.post(f"{self.url}/{path}", json=body, timeout=30).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def run(self, script: str):
        """Return the value of a script's expression."""
        return self.call("execute/sync", script=f"return {script}", args=[])

    def text(self, name: str) -> str:
        """Return the text of an element."""
        return self.run(f"document.getElementById('{name}').textContent")

    def put(self, name: str, text: str) -> None:
        """Type a text into an element."""
        found = self.call("element", using="css selector", value=f"#{name}")
        self.call(f"element/{next(iter(found.values()))}/value", text=text)

    def click(self, name: str) -> None:
        """Click on an element."""
        found = self.call("element", using="css selector", value=f"#{name}")
        self.call(f"element/{next(iter(found.values()))}/click")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + 30
        while not self.run(condition):
            assert time.monotonic() < deadline, (condition, self.run("document.body.innerText"))
            time.sleep(0.05)


@contextlib.contextmanager
def listening(app):
    """Serve an application on a free port of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture
def page(tmp_path):
    if DRIVER is None:
        pytest.skip("chromedriver is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    made = None
    try:
        deadline = time.monotonic() + 30
        while made is None:
            try:
                made = Page(f"http://127.0.0.1:{port}")
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield made
    finally:
        if made is not None:
            httpx.delete(made.url, timeout=30)
        process.terminate()
        process.wait(30)


def test_a_browser_asks_streams_and_shows_what_it_took(tiny, page):
    with listening(tiny.app) as url:
        page.call("url", url=url)
        page.wait("!document.getElementById('locked').hidden")
        assert "API key is missing" in page.text("error")
        page.put("key", KEY)
        page.put("document", "abc " * 60)
        page.put("question", "Who?")
        page.click("ask")
        page.wait("!document.getElementById('bytes').hidden")
        page.wait("document.getElementById('ask').textContent === 'Ask'")
        assert page.text("error") == "" and page.text("model") == "tiny"
        # The document, an empty line and the question, in bytes.
        assert page.text("read") == "246" and int(page.text("made")) > 1
        assert page.text("answer") and page.text("first").endswith(" s")
        assert float(page.text("speed")) > 0
        assert "times the memory" in page.text("saving")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")  # of a phone
        # The server's errors are one line.
        page.put("document", "abc " * 200)
        page.click("ask")
        page.wait("document.getElementById('error').textContent !== ''")
        assert page.text("error").startswith("prompt and answer must fit 512 tokens")
    page.click("ask")
    page.wait("document.getElementById('error').textContent.includes('does not answer')")
