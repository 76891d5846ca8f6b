"""Run programs without importing torch each time: a server process that has imported it forks for each run.

Each run is a separate process with its own arguments, environment and output, and can be killed.
"""

import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from select import select
from typing import NoReturn

from clipkit.model.architectures import ARCHITECTURES, Architecture, TextTower, VisionTower

ROOT = Path(__file__).parents[1]
Ended = subprocess.CompletedProcess[str]

# one layer in each tower, so that steps, checkpoints and measurements of FLOPs are small
ARCHITECTURES["ViT-test"] = Architecture(
    embed_dim=64,
    vision=VisionTower(image_size=16, patch_size=4, width=64, layers=1, heads=1),
    text=TextTower(width=32, layers=1, heads=2),
    small_data=True,
)


class Forked:
    """Runs ``train.py`` and other programs in processes forked from one that has imported torch."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "error::ResourceWarning", "-m", "tests.forked"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._lock = threading.Lock()

    def run(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        timeout: float = 300,
        cwd: Path = ROOT,
        folder: Path | None = None,
    ) -> Ended:
        """Run a program of the repository and wait until it exits.

        While it runs, ``folder`` contains files "pid", "out" and "error", if given.
        """
        with tempfile.TemporaryDirectory() as temporary:
            folder = folder or Path(temporary)
            request = {"argv": [program, *arguments], "environment": dict(environment), "folder": str(folder)}
            request["cwd"] = str(cwd)
            with self._lock:
                assert self._server.stdin is not None
                self._server.stdin.write(json.dumps(request) + "\n")
                self._server.stdin.flush()
            status, until = folder / "status", time.monotonic() + timeout
            while not status.exists():
                assert self._server.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            out, error = ((folder / name).read_text(encoding="utf-8") for name in ("out", "error"))
            return subprocess.CompletedProcess([program, *arguments], int(status.read_text()), out, error)

    def ranks(self, program: str, *arguments: str, world: int, timeout: float = 300) -> list[Ended]:
        """Run a program as ``world`` ranks with torchrun's environment variables; every rank must succeed."""
        meeting = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        meeting["MASTER_PORT"] = str(_free_port())

        def run(rank: int) -> Ended:
            environment = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
            return self.run(program, arguments, environment, timeout=timeout)

        with ThreadPoolExecutor(world) as pool:
            ended = list(pool.map(run, range(world)))
        failed = [one.stderr[-6000:] for one in ended if one.returncode]
        assert not failed, "\n".join(failed)
        return ended

    def close(self) -> None:
        """Stop the server process."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serve() -> None:
    # train.py and the modules that it imports lazily
    for name in ("train", "torchvision", "torch._dynamo", "torch.distributed.checkpoint.staging"):
        import_module(name)
    # caches that most runs fill
    tokenize = import_module("clipkit.model.tokenizer").tokenize
    tokenize(["a"])
    _ = import_module("transformers").AutoTokenizer  # imports many modules
    for name in ("timm", "transformers.models.bert.modeling_bert"):  # of the recipes of domains
        import_module(name)
    for name in ("numpy.ma", "numpy.ctypeslib", "rich._emoji_codes", "torch.utils._sympy.reference"):
        import_module(name)
    for name in ("eval.tasks.classify", "clipkit.inference.encode", "clipkit.inference.folder"):
        import_module(name)
    import_module("PIL.Image").init()
    templates = import_module("eval.report.charts").TEMPLATES
    for name in templates.list_templates(extensions=["html"]):
        templates.get_template(name)
    # a peak that is measured for a short time is too low, which only the MFU shows
    costs = import_module("clipkit.training.costs")
    costs.measured_peak.__kwdefaults__["seconds"] = 0.01
    # FLOPs of the longest texts only, not of three lengths
    polynomial = import_module("numpy.polynomial").Polynomial
    vars(costs)["_fit_lengths"] = lambda measure, shape: polynomial([measure(shape.text.context_length)])
    gc.collect()
    gc.freeze()  # otherwise a collection in a child copies the memory of all objects

    requests = os.fdopen(0, "rb", buffering=0, closefd=False)
    folders: dict[int, Path] = {}  # of the programs that run, by process
    while True:
        if select([requests], [], [], 0.02 if folders else None)[0]:
            line = requests.readline()
            if not line:
                return
            request = json.loads(line)
            folder = Path(request["folder"])
            process = os.fork()
            if process == 0:
                _run_program(request["argv"], request["environment"], folder, request["cwd"])
            (folder / "pid").write_text(str(process))
            folders[process] = folder
        for process in list(folders):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                folder = folders.pop(process)
                aside = folder / "status.aside"
                aside.write_text(str(os.waitstatus_to_exitcode(status)))
                aside.rename(folder / "status")


def _run_program(argv: Sequence[str], environment: Mapping[str, str], folder: Path, cwd: str) -> NoReturn:
    for number, name in ((0, os.devnull), (1, "out"), (2, "error")):
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = list(argv)
    status = 0
    try:
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    _end_process(status)


def _end_process(status: int) -> NoReturn:
    """Exit as the interpreter does, but without freeing its objects, which takes a second of CPU time."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
