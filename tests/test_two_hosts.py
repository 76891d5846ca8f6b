"""Tests of training on two hosts: a lost host rejoins, and the weights equal those of an uninterrupted run.

The hosts are network namespaces connected by a virtual cable, each with its own torchrun. They share the disk
with run folder and data. On one host, torchrun restarts a killed rank.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from data.shards.writer import DatasetWriter, Record

ROOT = Path(__file__).parent.parent
STEPS, SAVED_EVERY, LOST_AFTER = 18, 5, 11  # the second checkpoint waits until the first one is complete
SECONDS = 240  # timeout of a training
ADDRESSES = ("10.213.77.1", "10.213.77.2")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images of noise with captions, in three shards."""
    out = tmp_path_factory.mktemp("data") / "pairs"
    noise = np.random.default_rng(0)
    with DatasetWriter(out, samples_per_shard=20) as writer:
        for i in range(60):
            pixels = np.ascontiguousarray(noise.integers(0, 256, (20, 24, 3), dtype=np.uint8))
            image = simplejpeg.encode_jpeg(pixels)
            writer.write("train", Record(key=f"{i:04d}", image=image, extension="jpg", caption=f"noise {i}"))
        writer.finish({"name": "pairs"})
    return out


def settings(pairs: Path, out: Path) -> list[str]:
    return [
        str(ROOT / "train.py"), f"data.train={pairs}", f"out={out}", f"steps={STEPS}", "batch_size=8",
        "model.name=ViT-Ti-4-16", "data.workers=0", "optim.warmup=4", "eval.data=[]", "log.tensorboard=false",
        "log.every_steps=1", f"checkpoint.every_steps={SAVED_EVERY}",
    ]  # fmt: skip


def start(command: list[str], log: Path, **environment: str) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **environment},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def wait_for_steps(out: Path, steps: int, running: "subprocess.Popen[bytes]") -> None:
    metrics, until = out / "metrics.jsonl", time.monotonic() + SECONDS
    while not metrics.is_file() or metrics.read_text().count("\n") < steps:
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.005)


def weights(out: Path) -> bytes:
    return (out / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors").read_bytes()


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


class Hosts:
    """Two network namespaces connected by a virtual cable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, tuple(f"clipkit-{os.getpid()}-{i}" for i in (0, 1))
        self.ends = tuple(f"ck{os.getpid()}e{i}" for i in (0, 1))  # at most 15 characters
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for name, end, address in zip(self.names, self.ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/30", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")

    def torchrun(self, host: int, pairs: Path, out: Path) -> "subprocess.Popen[bytes]":
        """Start torchrun on one host; the rendezvous is on the first."""
        command = [
            "ip", "netns", "exec", self.names[host], sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-id", out.name,
            "--rdzv-conf", f"is_host={host == 0},keep_alive_interval=1,last_call_timeout=1",
            "--local-addr", ADDRESSES[host], *settings(pairs, out),
        ]  # fmt: skip
        environment = {
            "GLOO_SOCKET_IFNAME": self.ends[host],
            # otherwise a torchrun that joins later does not receive the rendezvous address (torch 2.15)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # a rank that waits for a lost one does not react to SIGTERM
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3",
        }
        return start(command, self.log(out, host), **environment)

    def log(self, out: Path, host: int) -> Path:
        return self.folder / f"{out.name}-{host}.log"

    def lose(self, host: int) -> None:
        """Disconnect a host, kill all of its processes, and connect it again."""
        ip("-n", self.names[host], "link", "set", self.ends[host], "down")
        self.kill(host)
        ip("-n", self.names[host], "link", "set", self.ends[host], "up")

    def kill(self, host: int) -> None:
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        for host, name in enumerate(self.names):
            self.kill(host)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    try:
        made = Hosts(tmp_path)
    except FileNotFoundError:
        pytest.skip("there is no `ip`: install iproute2")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.close()


def end_of(run: "subprocess.Popen[bytes]", log: Path) -> None:
    assert run.wait(timeout=SECONDS) == 0, log.read_text()[-4000:]


@pytest.mark.long
def test_run_survives_lost_host_with_identical_weights(hosts: Hosts, pairs: Path, tmp_path: Path) -> None:
    whole, lossy = tmp_path / "whole", tmp_path / "lossy"
    for host, run in enumerate([hosts.torchrun(host, pairs, whole) for host in (0, 1)]):
        end_of(run, hosts.log(whole, host))

    first, second = (hosts.torchrun(host, pairs, lossy) for host in (0, 1))
    wait_for_steps(lossy, LOST_AFTER, first)
    hosts.lose(1)
    assert second.wait(timeout=SECONDS) == -signal.SIGKILL
    again = hosts.torchrun(1, pairs, lossy)
    end_of(first, hosts.log(lossy, 0))  # torchrun on the remaining host restarted its rank
    end_of(again, hosts.log(lossy, 1))

    assert "resuming" in hosts.log(lossy, 0).read_text()
    assert weights(lossy) == weights(whole)
    assert losses(lossy) == losses(whole)


@pytest.mark.long
def test_torchrun_restarts_killed_rank_with_identical_results(pairs: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--max-restarts", "1"]
    end_of(start([*launch, *settings(pairs, whole)], tmp_path / "whole.log"), tmp_path / "whole.log")

    run = start([*launch, *settings(pairs, killed)], tmp_path / "killed.log")
    wait_for_steps(killed, LOST_AFTER, run)
    os.kill(process_of_rank(1, run.pid), signal.SIGKILL)
    end_of(run, tmp_path / "killed.log")
    assert f"resuming {killed} at step" in (tmp_path / "killed.log").read_text()
    assert weights(killed) == weights(whole)
    assert losses(killed) == losses(whole)


def process_of_rank(rank: int, torchrun: int) -> int:
    """Find a child process of torchrun by its environment."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    for pid in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(children)
