"""Commands that the studies run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def run(*command: str, log: Path | None = None, jobs: int = 1) -> None:
    """Run a Python command from the repository root; exit with its status if it fails.

    Args:
        command: arguments of the interpreter.
        log: file to append the output to; None: the terminal.
        jobs: commands that run at a time and share the machine's cores.
    """
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    with Path(log or os.devnull).open("a", encoding="utf-8") as file:
        to = file if log else None
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, check=False, stdout=to, stderr=to, env=environment
        )
    if done.returncode:
        where = f"; see {log}" if log else ""
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}{where}")
