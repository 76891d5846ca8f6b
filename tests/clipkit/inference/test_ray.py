"""Tests of encoding on a Ray cluster: files equal those of one process, also if a worker and a node die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import clipkit
from clipkit.__main__ import dispatch
from clipkit.cli import ModelOptions
from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import save_model
from clipkit.inference import encode as module
from clipkit.inference.encode import encode, encode_on_ray
from clipkit.inference.folder import Manifest
from clipkit.inference.inputs import Item, Stream
from clipkit.inference.stream import FeatureStream
from clipkit.options import EncodeOptions

pytest.importorskip("pyarrow")
COUNT, ROWS = 240, 10


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The relative path of a folder of images, some broken and one transparent; writes a model beside it."""
    (tmp_path / "photos").mkdir()
    random = np.random.default_rng(0)
    for number in range(COUNT):
        path = tmp_path / "photos" / f"{number:03d}.png"
        pixels = random.integers(0, 256, (20, 24, 4 if number == 7 else 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        if number % 50 == 3 or 30 <= number < 40:
            path.write_bytes(b"broken")
    save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return "photos"


def options() -> ModelOptions:
    return ModelOptions(model="model", device="cpu", batch_size=4, workers=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def test_ray_tasks_write_the_files_of_one_process(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cluster: tasks run in this process in reverse order, and results are pickled as by Ray."""
    import pickle

    def called(ray: object, function: Any, arguments: Iterator[Any], *, resource: str) -> Iterator[Any]:
        assert resource == "CPU"
        for argument in reversed(list(arguments)):
            yield pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(argument)))))

    class NoCluster:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(module, "ray_cluster", NoCluster)
    monkeypatch.setattr(module, "ray_tasks", called)
    for name, encode_parts in (("one", None), ("ray", partial(encode_on_ray, address="", options=options()))):
        features = FeatureStream.from_options(options())
        encoded = encode(
            Stream([photos]),
            features,
            EncodeOptions(sources=(), model="", out=tmp_path / name, rows_per_file=ROWS, quiet=True),
            encode_parts=encode_parts,
        )
        assert encoded.written == COUNT // ROWS and encoded.failed == 15
        assert (features.counts.images, features.counts.transparent) == (COUNT - 15, 1)
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")

    facts = {"kind": "image", "model": "", "sources": [], "items": 1, "digest": "", "captions": False}
    run = {"rows_per_file": 1, "batch_size": 4, "precision": "fp32", "device": "cpu"}
    manifest = Manifest(**facts, **run, weights="other", directory=str(tmp_path))  # type: ignore[arg-type]
    items = [(0, Item(source="", key="a", image=Path("a")))]
    with pytest.raises(DataError, match=r"absent\.png is not visible on the node .*: --ray needs sources"):
        module._encode_part(items, manifest, options(), Path("absent.png"))
    with pytest.raises(DataError, match="is not visible on the node"):
        module._encode_part(items, replace(manifest, directory=str(tmp_path / "no")), options(), None)
    monkeypatch.setattr(module, "_here", {})
    with pytest.raises(DataError, match=r"model on the node .* is another model"):
        module._encode_part(items, manifest, options(), None)


def test_missing_cluster_and_torchrun_are_rejected(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["encode", photos, "--model", "model", "--out", "out", "--device", "cpu", "--quiet", "--ray"]
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"--ray 127\.0\.0\.1:1: no Ray cluster"):
        dispatch([*arguments, "127.0.0.1:1"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        dispatch([*arguments, "local"])


@pytest.mark.long
def test_cluster_that_loses_a_worker_and_a_node(photos: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    def command(out: str, *more: str) -> list[str]:
        chosen = ["--model", "model", "--device", "cpu", "--batch-size", "4", "--rows-per-file", str(ROWS)]
        return [sys.executable, "-m", "clipkit", "encode", photos, "--out", out, "--quiet", *chosen, *more]

    environment = {**os.environ, "PYTHONPATH": str(Path(clipkit.__file__).parents[1])}
    subprocess.run(command("one"), env=environment, check=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        node = cluster.add_node(num_cpus=1)
        process = subprocess.Popen(command("ray", "--ray", cluster.address), env=environment)

        def wait_for(written: int) -> None:
            end = time.monotonic() + 300
            while len(list(tmp_path.glob("ray/.parts/*.jsonl"))) < written:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.02)

        wait_for(2)
        raylet = node.all_processes["raylet"][0].process.pid
        killed = worker_of(raylet)
        os.kill(killed, signal.SIGKILL)
        lost = worker_of(raylet, other=killed)  # another worker encodes
        os.kill(lost, signal.SIGSTOP)  # until the other node has started
        cluster.add_node(num_cpus=1)
        cluster.remove_node(node, allow_graceful=False)
        with suppress(ProcessLookupError):
            os.kill(lost, signal.SIGKILL)
        assert len(list(tmp_path.glob("ray/.parts/*.jsonl"))) < COUNT // ROWS
        assert process.wait(timeout=600) == 0
    finally:
        cluster.shutdown()
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")


def worker_of(raylet: int, *, other: int = 0) -> int:
    """Wait for a process of a node that encodes a part and is not ``other``."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                encodes = (path / "cmdline").read_bytes().startswith(b"ray::_encode_part")
                if (
                    encodes
                    and int(path.name) != other
                    and f"PPid:\t{raylet}\n" in (path / "status").read_text()
                ):
                    return int(path.name)
            except OSError:  # it has ended
                continue
        time.sleep(0.005)
    raise AssertionError("the node encodes nothing")
