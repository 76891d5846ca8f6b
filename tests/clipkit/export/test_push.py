"""Tests of pushing exports to a server that implements the hub's protocol."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
import torch

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import save_model
from tests.clipkit.exported_models import model_of, same_model

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # by the hub client
TOKEN = "hf_aSecretThatIsNeverPrinted"


class Hub(ThreadingHTTPServer):
    """Repositories of the user ``me``: files by path, and a separate store for large files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.stored: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.fails: dict[str, int] = {}  # status by a part of the path

    def sha(self, repository: str) -> str:
        return hashlib.sha1(repr(sorted(self.files[repository].items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, value: Any = None, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, content in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, content)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def respond(self) -> None:
        hub, path = self.server, unquote(urlparse(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        failed = next((status for part, status in hub.fails.items() if part in path), 0)
        if path == "/":
            return self.answer({})
        if failed:
            return self.answer({"error": "no"}, status=failed)
        if path.startswith("/stored/"):  # a signed URL
            hub.stored[path.removeprefix("/stored/")] = body
            hub.uploads.append(path.removeprefix("/stored/"))
            return self.answer({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, status=401)
        if path == "/api/whoami-v2":
            return self.answer({"name": "me", "type": "user"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or 'me'}/{asked['name']}"
            if not name.startswith("me/"):
                return self.answer({"error": "no"}, status=403)
            known = name in hub.files
            hub.files.setdefault(name, {})
            hub.private.setdefault(name, asked.get("visibility") == "private" or asked.get("private") is True)
            return self.answer({"url": f"{hub.url}/{name}"}, status=409 if known else 200)
        repository = next((file for file in hub.files if f"/{file}" in path), "")
        if not repository:
            return self.answer({"error": "no"}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        action = path.partition(f"/{repository}")[2]
        return self.in_repository(repository, action, body)

    def in_repository(self, repository: str, action: str, body: bytes) -> None:
        hub = self.server
        files = hub.files[repository]
        if action.startswith("/preupload/"):
            modes = [
                {
                    "path": entry["path"],
                    "uploadMode": "lfs" if entry["size"] > 10_000 else "regular",
                    "shouldIgnore": False,
                }
                for entry in json.loads(body)["files"]
            ]
            return self.answer({"files": modes})
        if action == ".git/info/lfs/objects/batch":
            objects = [
                {**entry, **({} if entry["oid"] in hub.stored else {"actions": {"upload": {"href": href}}})}
                for entry in json.loads(body)["objects"]
                for href in [f"{hub.url}/stored/{entry['oid']}"]
            ]
            return self.answer({"objects": objects, "transfer": "basic"})
        if action.startswith("/commit/"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    content = hub.stored[value["oid"]]
                    assert hashlib.sha256(content).hexdigest() == value["oid"]
                    files[value["path"]] = content
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            address = f"{hub.url}/{repository}/commit/{hub.sha(repository)}"
            return self.answer({"commitUrl": address, "commitOid": hub.sha(repository)})
        if action.startswith("/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(file), "oid": "0"} for name, file in files.items()
            ]
            return self.answer(tree)
        if action.startswith("/resolve/"):
            name = action.split("/", 3)[3]
            if name not in files:
                return self.answer({"error": "no"}, status=404, headers={"X-Error-Code": "EntryNotFound"})
            etag = hashlib.sha256(files[name]).hexdigest()
            return self.answer(
                files[name], headers={"ETag": f'"{etag}"', "X-Repo-Commit": hub.sha(repository)}
            )
        names = [{"rfilename": name} for name in files]
        return self.answer({"id": repository, "sha": hub.sha(repository), "siblings": names, "tags": []})

    do_GET = do_HEAD = do_POST = do_PUT = respond


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def source(tmp_path: Path) -> str:
    save_model(model_of("quick_gelu"), tmp_path / "model")
    return str(tmp_path / "model")


def test_pushed_model_loads(
    hub: Hub, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    assert dispatch(["export", source, str(out), "--to", "open_clip", "--push", "me/pets"]) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    assert line == f"uploaded to {hub.url}/me/pets: clipkit.load('hf-hub:me/pets') loads it"
    assert hub.private == {"me/pets": True}
    assert hub.files["me/pets"] == {
        path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }
    same_model(clipkit.load("hf-hub:me/pets"), clipkit.load(source))

    # another model for another library replaces the first, but keeps the user's own file
    hub.files["me/pets"]["LICENSE"] = b"mine"
    other = model_of("quick_gelu")
    with torch.no_grad():
        other.logit_scale.add_(1)
    save_model(other, tmp_path / "other")
    second = [str(tmp_path / "other"), str(tmp_path / "second"), "--to", "transformers", "--push", "me/pets"]
    assert dispatch(["export", *second, "--public"]) == 0
    assert hub.private == {"me/pets": True} and hub.files["me/pets"]["LICENSE"] == b"mine"
    assert "open_clip_config.json" not in hub.files["me/pets"]
    same_model(clipkit.load("hf-hub:me/pets"), other)
    assert TOKEN not in "".join(capfd.readouterr()) + caplog.text


def test_interrupted_push_resumes(hub: Hub, source: str, tmp_path: Path) -> None:
    arguments = [
        "export",
        source,
        str(tmp_path / "out"),
        "--to",
        "open_clip",
        "--push",
        "me/pets",
        "--public",
    ]
    hub.fails["/commit/"] = 503
    with pytest.raises(
        ConfigError, match="the hub answered with status 503; run the same command again to resume"
    ):
        dispatch(arguments)
    sent = list(hub.uploads)
    assert sent and not hub.files["me/pets"]
    hub.fails.clear()
    assert dispatch(arguments) == 0
    assert hub.uploads == sent  # the server kept large files
    assert hub.private == {"me/pets": False}
    same_model(clipkit.load("hf-hub:me/pets"), clipkit.load(source))


def test_push_errors_are_one_line(
    hub: Hub, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def refused(repository: str = "me/pets") -> str:
        with pytest.raises(ConfigError) as caught:
            dispatch(["export", source, str(out), "--to", "open_clip", "--push", repository])
        message = str(caught.value)
        assert "\n" not in message and TOKEN not in message + "".join(capfd.readouterr())
        return message

    for name in ("pets", "me/", "/pets", "me/pe ts", "me/a/b", "me/--x"):
        assert "is not a repository" in refused(name)
    with pytest.raises(ConfigError, match="--public has no effect without --push"):
        dispatch(["export", source, str(out), "--public"])
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token is invalid or expired: set HF_TOKEN" in refused()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token: set HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert not out.exists()  # detected before the export
    assert "the token may not write there" in refused("others/pets")
    hub.fails["/preupload/"] = 404
    assert "there is no such owner or repository, or the token gives no access" in refused()
    hub.fails = {"/stored/": 403}
    assert "the token may not write there" in refused()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert refused() == "cannot write me/pets: http://127.0.0.1:1 does not respond: check the network"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids it" in refused()
