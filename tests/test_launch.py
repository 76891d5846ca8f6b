"""Tests of the launch files: a simulated job of the SLURM script, and the Kubernetes manifest."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import yaml  # type: ignore[import-untyped]

from clipkit.config import load_config
from data.shards.writer import DatasetWriter, Record

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "configs" / "launch"
STEPS, SECONDS = 12, 150
# stand-ins for SLURM's programs: one node, localhost; requeue requests are appended to a file
PROGRAMS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": 'if [[ $1 == show ]]; then echo localhost; else echo "$@" >>"$QUEUE"; fi\n',
    "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"\n',
}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "pairs", samples_per_shard=20) as writer:
        for i in range(40):
            pixels = np.ascontiguousarray(noise.integers(0, 256, (20, 24, 3), dtype=np.uint8))
            image = simplejpeg.encode_jpeg(pixels)
            writer.write("train", Record(key=f"{i:04d}", image=image, extension="jpg", caption=f"noise {i}"))
        writer.finish({"name": "pairs"})
    return tmp_path / "pairs"


class Job:
    """A simulated SLURM job on one node with two processes."""

    def __init__(self, folder: Path, pairs: Path) -> None:
        self.out, self.queue, self.log = folder / "run", folder / "queue", folder / "log"
        programs = folder / "environment" / "bin"
        programs.mkdir(parents=True)
        for name, text in PROGRAMS.items():
            (programs / name).write_text("#!/usr/bin/env bash\n" + text)
            (programs / name).chmod(0o755)
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        settings = (
            f"steps={STEPS} batch_size=8 model.name=ViT-Ti-4-16 data.workers=0 optim.warmup=2 eval.data=[] "
            "log.tensorboard=false log.every_steps=1 checkpoint.every_steps=0"
        )
        self.environment = {
            **os.environ, "PYTHON": sys.executable, "QUEUE": str(self.queue), "REPOSITORY": str(ROOT),
            "ENVIRONMENT": str(programs.parent), "CONFIG": "configs/quickstart.toml", "DATA": str(pairs),
            "OUT": str(self.out), "PORT": str(port), "SETTINGS": settings, "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node[1]",
            "SLURM_GPUS_ON_NODE": "2", "CACHE": str(folder / "cache"), "INDEX_CACHE": str(folder / "index"),
        }  # fmt: skip

    def start(self, restarts: int) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as file:
            environment = {**self.environment, "SLURM_RESTART_COUNT": str(restarts)}
            return subprocess.Popen(
                ["bash", str(LAUNCH / "slurm.sh")], env=environment, stdout=file, stderr=file
            )

    def latest(self) -> int:
        return int((self.out / "checkpoints" / "LATEST").read_text().removeprefix("step_"))


@pytest.mark.long
def test_slurm_job_saves_requeues_and_resumes_on_sigusr1(pairs: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, pairs)
    run, metrics = job.start(0), job.out / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    while not metrics.is_file() or metrics.read_text().count("\n") < 3:
        assert run.poll() is None and time.monotonic() < until, job.log.read_text()
        time.sleep(0.01)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(timeout=SECONDS) == 0, job.log.read_text()[-3000:]
    assert job.queue.read_text() == "requeue 77\n"
    assert 3 <= job.latest() < STEPS

    assert job.start(1).wait(timeout=SECONDS) == 0, job.log.read_text()[-3000:]
    assert f"resuming {job.out} at step" in job.log.read_text()
    assert job.latest() == STEPS
    assert job.queue.read_text() == "requeue 77\n"  # no second request


def test_failed_slurm_job_is_not_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path)
    (tmp_path / "environment" / "bin" / "torchrun").write_text("#!/usr/bin/env bash\nexit 7\n")
    assert job.start(0).wait(timeout=SECONDS) == 7
    assert not job.queue.exists()


@pytest.mark.parametrize("check", [["bash", "-n"], ["shellcheck"]])
def test_slurm_script_passes_linters(check: list[str]) -> None:
    if shutil.which(check[0]) is None:
        pytest.skip(f"{check[0]} is not installed")
    done = subprocess.run([*check, str(LAUNCH / "slurm.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubernetes_manifest_is_consistent() -> None:
    settings, service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert [part["kind"] for part in (settings, service, job)] == ["ConfigMap", "Service", "Job"]
    assert all(isinstance(value, str) for value in settings["data"].values())  # required by Kubernetes
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == int(settings["data"]["NODES"])
    assert spec["completionMode"] == "Indexed"
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"  # headless: each pod has its own DNS name
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(settings["data"]["GPUS"])
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    shell, options, program = container["command"]
    assert f"{name}-0.{pod['subdomain']}:29500" in program
    known = {*settings["data"], *(variable["name"] for variable in container["env"]), "JOB_COMPLETION_INDEX"}
    used = {word for word in known if f"${word}" in program}
    assert used == known - {
        "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "PYTORCH_ALLOC_CONF", "CLIPKIT_CACHE",
    }  # fmt: skip
    done = subprocess.run([shell, "-n", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and options == "-euc", done.stderr
    assert load_config(ROOT / settings["data"]["CONFIG"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    caches = [settings["data"][name] for name in ("CLIPKIT_CACHE", "CLIPKIT_INDEX_CACHE")]
    assert "emptyDir" in volumes[mounts[caches[0]]]  # of the node
    assert "persistentVolumeClaim" in volumes[mounts[str(Path(caches[1]).parent)]]  # of all nodes
    grace = pod["terminationGracePeriodSeconds"]
    assert int(settings["data"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
