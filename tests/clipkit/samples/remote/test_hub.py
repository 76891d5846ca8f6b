"""Tests of errors at Hugging Face, with a server that implements the hub's protocol."""

import socket
from pathlib import Path

import pytest

from clipkit.samples.remote import HUB_FORM, describe_files, list_folder, transfer
from data.shards.samples import find_shards
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import Nginx, error_of

impatient = servers.impatient
nginx = servers.nginx

FORM = "hf://datasets/OWNER/NAME/PATH-{00000..00010}.tar"


@pytest.fixture
def hub(nginx: Nginx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nginx:
    """A hub with the dataset who/what, which contains no files."""
    pytest.importorskip("huggingface_hub")
    nginx.put("about", b'{"id": "who/what", "_id": "1", "sha": "1", "siblings": [], "tags": []}')
    nginx.put("tree", b"[]")
    nginx.add("""
        location /api/ { add_header X-Error-Code RepoNotFound always; return 401; }
        location /api/datasets/who/what { default_type application/json; try_files /about =404; }
        location /api/datasets/who/what/revision {
            add_header X-Error-Code RevisionNotFound always; return 404;
        }
        location = /api/datasets/who/what/tree/main { default_type application/json; try_files /tree =404; }
        location /api/datasets/who/what/tree/main/ { add_header X-Error-Code EntryNotFound always; return 404; }
    """)
    use(nginx.url("").rstrip("/"), monkeypatch)
    return nginx


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "_clients", {})
    monkeypatch.setenv("HF_TOKEN", "t0ken")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "hf://datasets/who/other/{0..3}.tar",
            "there is no such repository at Hugging Face, or it is private",
        ),
        (
            "hf://datasets/who/other",
            "there is no such repository at Hugging Face, or it is private and HF_TOKEN gives no access",
        ),
        ("hf://who/what", "there is no such repository at Hugging Face"),
        ("hf://who/what/{0..3}.tar", "there is no such repository at Hugging Face"),
        ("hf://datasets/who/what@old/0.tar", "the repository has no such revision"),
        ("hf://datasets/who/what/0.tar", "there is no such file"),
        (
            "hf://datasets/who/what/{0..3}.tar",
            "4 of 4 shards are missing, the first is hf://datasets/who/what/0",
        ),
        (
            "hf://datasets/who/what",
            "no tar, table or Parquet file of split 'train' in hf://datasets/who/what; name the shards",
        ),
        ("hf://what", "not a file of a repository"),
        ("hf://datasets/what", "not a file of a repository"),
    ],
)
def test_wrong_names_raise_error_with_the_expected_form(source: str, said: str, hub: Nginx) -> None:
    message = error_of(lambda: find_shards(source))
    assert said in message and message.endswith(FORM) and FORM == HUB_FORM


def test_unreachable_hub_raises_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    for endpoint, said in (
        (f"http://127.0.0.1:{port}", "the connection failed (Connection refused)"),
        ("http://no-such-host.invalid", "the host is unknown"),
    ):
        use(endpoint, monkeypatch)
        for work in (
            lambda: describe_files(["hf://datasets/who/what/0.tar"]),
            lambda: list_folder("hf://datasets/who/what"),
        ):
            message = error_of(work)
            assert said in message and "gave up after 3 tries" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = error_of(lambda: describe_files(["hf://datasets/who/what/0.tar"]))
    assert message == "hf://datasets/who/what/0.tar: HF_HUB_OFFLINE forbids downloads: unset it"
