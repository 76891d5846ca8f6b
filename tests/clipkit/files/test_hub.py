"""Tests of downloads from the Hugging Face hub: without a network they fail soon, with a one-line error."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from clipkit.errors import ConfigError
from clipkit.files.hub import convert_hub_errors
from clipkit.model.names import create_architecture, from_open_clip
from clipkit.model.tokenizer import LibraryTokenizer

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set huggingface_hub online, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)


def test_missing_network_raises_one_line_error(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    text = {"hf_model_name": "somebody/something", "hf_tokenizer_name": "somebody/something"}
    config = {"embed_dim": 32, "vision_cfg": {"layers": 1}, "text_cfg": text}
    began = time.monotonic()
    for attempt in (
        lambda: create_architecture("ViT-B-32", text="transformers:somebody/something"),
        lambda: from_open_clip(config),
        lambda: LibraryTokenizer(source="somebody/something", context_length=16)(["a cat"]),
    ):
        with pytest.raises(ConfigError, match="'somebody/something' is not a usable folder, and ") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 60  # imports take up to 20 s on a busy machine, retries 90 s
    assert constants.HF_HUB_OFFLINE is False
    assert capfd.readouterr().err == "" and not caplog.records


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a server that answers 404 to every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_libraries_stay_online_if_the_hub_answers(
    refusing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", refusing)
    with convert_hub_errors("somebody/something"):
        assert constants.HF_HUB_OFFLINE is False
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    with convert_hub_errors(str(tmp_path)):  # a folder needs no connection
        assert constants.HF_HUB_OFFLINE is False
    with convert_hub_errors("somebody/something"):
        assert constants.HF_HUB_OFFLINE is True
