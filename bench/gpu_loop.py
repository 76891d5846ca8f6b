"""The training loop on a GPU: the speed of ``train.py`` with its loader, and which computations repeat exactly.

``measure_loop`` runs ``train.py`` on shards of JPEG files. ``check_resume`` kills a run with SIGKILL, resumes it,
and compares its weights with those of an uninterrupted run. ``check_repeats`` computes the gradients of attention
and of whole models several times from the same inputs, with and without torch's deterministic algorithms.
"""

import hashlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_steps import make_batch
from clipkit.model.architectures import ARCHITECTURES
from clipkit.model.clip import create
from clipkit.model.towers import attention_varlen, pack
from clipkit.objectives.clip import clip_loss

__all__ = ["LoopRun", "check_repeats", "check_resume", "measure_loop", "write_shards"]

ROOT = Path(__file__).parents[1]
WORDS = (
    "red",
    "green",
    "blue",
    "small",
    "large",
    "dog",
    "cat",
    "tree",
    "house",
    "road",
    "on",
    "under",
    "near",
)
REPEATS = 5
WARM_UP = 20  # steps that are not measured


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """One run of ``train.py`` to measure."""

    name: str
    steps: int
    settings: tuple[str, ...]
    profile: int = 0


def write_shards(folder: Path, *, shards: int, samples: int, side: int) -> str:
    """Write shards of ``samples`` JPEG files with captions each; return a brace pattern."""
    folder.mkdir(parents=True)
    with ProcessPoolExecutor(min(shards, os.cpu_count() or 1)) as pool:
        list(pool.map(partial(_write_shard, folder, samples, side), range(shards)))
    return str(folder / f"{{{0:04}..{shards - 1:04}}}.tar")


def _write_shard(folder: Path, samples: int, side: int, index: int) -> None:
    from PIL import Image

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(index)
    with tarfile.open(folder / f"{index:04}.tar", "w") as tar:
        for sample in range(samples):
            # a smooth image with a little noise compresses like a photograph
            coarse = torch.rand(1, 3, 16, 16, generator=generator)
            image = F.interpolate(coarse, size=(side, side), mode="bicubic")[0]
            image += 0.06 * torch.randn(3, side, side, generator=generator)
            pixels = image.clamp(0, 1).mul(255).byte().permute(1, 2, 0).contiguous()
            jpeg = io.BytesIO()
            Image.fromarray(pixels.numpy()).save(jpeg, "JPEG", quality=90)
            length = int(torch.randint(6, 20, (), generator=generator))
            choice = torch.randint(len(WORDS), (length,), generator=generator).tolist()
            caption = " ".join(WORDS[word] for word in choice)
            _add_member(tar, f"{sample:06}.jpg", jpeg.getvalue())
            _add_member(tar, f"{sample:06}.txt", caption.encode())


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def measure_loop(shards: str, folder: Path, run: LoopRun, *, workers: int) -> dict[str, Any]:
    """Run ``train.py`` and return medians over its logged steps after the first ones."""
    out = folder / run.name.replace(" ", "_").replace("/", "-")
    began = time.monotonic()
    finished = subprocess.run(
        _command(shards, out, workers, f"steps={run.steps}", *run.settings, profile=run.profile),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        return {"error": finished.stderr[-2000:]}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("step", 0) > min(WARM_UP, run.steps // 2) and "batch_time" in row]
    report: dict[str, Any] = {"settings": run.settings, "seconds_in_all": time.monotonic() - began}
    for key in rows[-1]:
        if key.endswith("_time") or key in ("samples_per_second", "mfu", "memory_gib"):
            values = [row[key] for row in rows if row.get(key) is not None]
            report[key] = statistics.median(values) if values else None
    table = out / "profile" / "table.txt"
    if table.exists():
        report["profile"] = table.read_text().splitlines()
    shutil.rmtree(out)
    return report


def check_resume(
    shards: str, folder: Path, settings: Sequence[str], *, steps: int, workers: int
) -> dict[str, Any]:
    """Compare the weights of a run and of one that was killed and resumed."""
    checksums = []
    for name in ("uninterrupted", "killed"):
        out = folder / name
        command = _command(
            shards, out, workers, f"steps={steps}", f"checkpoint.every_steps={steps // 3}", *settings
        )
        with (folder / f"{name}.log").open("w") as log:
            if name == "killed" and not _killed_after_checkpoint(command, out, log):
                return {"error": "the run ended before it could be killed"}
            finished = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
        if finished.returncode:
            return {"error": (folder / f"{name}.log").read_text()[-2000:]}
        checksums.append(_checksum(out / "checkpoints" / f"step_{steps:08}" / "model.safetensors"))
        shutil.rmtree(out)
    return {"settings": tuple(settings), "steps": steps, "equal": checksums[0] == checksums[1]}


def _killed_after_checkpoint(command: list[str], out: Path, log: Any) -> bool:
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    while process.poll() is None:
        if list((out / "checkpoints").glob("step_*/COMPLETE")):
            process.kill()
            process.wait()
            return True
        time.sleep(0.01)
    return False


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _command(shards: str, out: Path, workers: int, *settings: str, profile: int = 0) -> list[str]:
    return [
        sys.executable, "train.py", f"data.train={shards}", f"out={out}", f"data.workers={workers}",
        "log.tensorboard=false", "eval.data=[]", *settings,
        *(("--profile", str(profile)) if profile else ()),
    ]  # fmt: skip


def check_repeats(
    device: torch.device, models: Sequence[str], *, tokens: Sequence[int], rows: int, repeats: int = REPEATS
) -> dict[str, Any]:
    """Check whether gradients repeat bit for bit, by default and in deterministic mode.

    Call this in a new process, before CUDA starts. Returns the results and seconds by computation.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    report: dict[str, Any] = {}
    for length in tokens:
        compute = _image_attention(device, rows, length)
        report[f"attention over {length} tokens"] = _in_both_modes(compute, repeats)
    report["attention over packed texts"] = _in_both_modes(_text_attention(device, rows), repeats)
    for name in models:
        report[name] = _in_both_modes(_model_gradients(device, name, rows), repeats)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return report


def _in_both_modes(compute: Callable[[], list[Tensor]], repeats: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for mode in ("default", "deterministic"):
        torch.use_deterministic_algorithms(mode == "deterministic")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            report[mode] = _repeat(compute, repeats)
        except RuntimeError as error:
            report[mode] = {"error": str(error)[:300]}
        finally:
            torch.use_deterministic_algorithms(False)
    return report


def _repeat(compute: Callable[[], list[Tensor]], repeats: int) -> dict[str, Any]:
    reference = [tensor.clone() for tensor in compute()]
    is_equal, seconds = True, []
    for _ in range(repeats):
        _synchronize()
        began = time.perf_counter()
        gradients = compute()
        _synchronize()
        seconds.append(time.perf_counter() - began)
        for expected, gradient in zip(reference, gradients, strict=True):
            is_equal &= torch.equal(expected, gradient)
    return {"repeats exactly": is_equal, "seconds": statistics.median(seconds)}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _image_attention(device: torch.device, rows: int, tokens: int) -> Callable[[], list[Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (rows, 16, tokens, 64)
    q, k, v, grad = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def compute() -> list[Tensor]:
        return list(torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), inputs, grad))

    return compute


def _text_attention(device: torch.device, rows: int) -> Callable[[], list[Tensor]]:
    if device.type != "cuda":
        return _image_attention(device, rows, 16)
    generator = torch.Generator(device).manual_seed(0)
    lengths = make_batch(ARCHITECTURES["ViT-B-32"], rows, device).lengths
    packed = pack(lengths, longest=77, attention=attention_varlen, device=device)
    shape = (sum(lengths), 8, 64)
    q, k, v, grad = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def compute() -> list[Tensor]:
        mixed = attention_varlen(q, k, v, packed, ends_only=False)
        return list(torch.autograd.grad(mixed, inputs, grad))

    return compute


def _model_gradients(device: torch.device, name: str, rows: int) -> Callable[[], list[Tensor]]:
    shape = ARCHITECTURES[name]
    model = create(shape, name=name, seed=0).to(device).train()
    batch = make_batch(shape, rows, device)

    def compute() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            features = model(batch.images, batch.tokens, lengths=batch.lengths)
        torch.autograd.backward(clip_loss(*features))
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return compute
