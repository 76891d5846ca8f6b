"""Measure how long commands take to print ``--help``, and a training to make its first step.

    python -m bench.startup [--rounds 5] [--against FOLDER] [--only help training]

Help: seconds of each command and sub-command. Training: seconds from the command to the first line of
``metrics.jsonl``, for the quickstart with its corpus already rendered, with ``python train.py`` and with torchrun;
for comparison ``python -c "import torch"`` and torchrun with an empty script, which no clipkit code can shorten.
``--dry-run`` is measured until its process ends.

Other programs delay a command more than they change its CPU time (of all its processes), so both are measured. With
``--against``, another checkout is measured in the same alternating rounds, such as the commit before a change:

    mkdir /tmp/before && git archive COMMIT | tar -x -C /tmp/before

Figures are medians over rounds.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import clipkit.options
import data.options
import eval.options
from bench.options import ROOT
from data.corpora.builtin import built_in

RESULT = Path(__file__).parent / "results" / "startup.json"
LIMIT = 300.0  # seconds, after which a command has failed
HELP: dict[str, list[str]] = {"train.py": ["train.py"]}
for _package, _commands in (
    ("clipkit", clipkit.options.COMMANDS),
    ("data", data.options.COMMANDS),
    ("eval", eval.options.COMMANDS),
):
    HELP |= {
        " ".join((_package, *words)): ["-m", _package, *words]
        for words in [(), *((name,) for name in _commands)]
    }
TORCHRUN = ["-m", "torch.distributed.run"]


def cpu_seconds(root: int) -> float:
    """Return the CPU time of a process, its descendants, and their children that have ended."""
    processes: dict[int, tuple[int, int]] = {}  # parent, and ticks
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(") ")[2].split()
            processes[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ticks = 0
    for process, (_, own) in processes.items():
        while process in processes and process != root:
            process = processes[process][0]
        ticks += own if process == root else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(command: list[str], folder: Path, first_line: Path | None = None) -> tuple[float, float]:
    """Run Python with a command line; return wall-clock and CPU seconds until it ends or has written a file."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    began = time.perf_counter()
    started = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while True:
            # without reaping it, so that its times can still be read
            ended = os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            wrote = first_line is not None and first_line.is_file() and first_line.stat().st_size > 0
            if wrote or ended is not None:
                break
            assert time.perf_counter() - began < LIMIT, command
            time.sleep(0.005)
        seconds = time.perf_counter() - began, cpu_seconds(started.pid)
        assert wrote if first_line else ended is not None and ended.si_status == 0, command
        return seconds
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def trainings(out: Path) -> dict[str, tuple[list[str], Path | None]]:
    """Return the command lines by name, and the file that each writes; torchrun's ranks die with it."""
    run = ["train.py", "configs/quickstart.toml"]
    empty = out / "empty.py"
    empty.touch()
    lines: dict[str, tuple[list[str], Path | None]] = {
        "import torch": (["-c", "import torch"], None),
        "torchrun, empty script": ([*TORCHRUN, "--standalone", str(empty)], None),
    }
    for name, launcher in (("python train.py", []), ("torchrun train.py", [*TORCHRUN, "--standalone"])):
        folder = out / name.replace(" ", "_")
        lines[name] = [*launcher, *run, f"out={folder}"], folder / "metrics.jsonl"
    lines["python train.py --dry-run"] = [*run, "--dry-run"], None
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", nargs="+", choices=("help", "training"), default=("help", "training"))
    options = parser.parse_args()
    for name in ("glyphs", "digits"):
        built_in(name)
    folders = {"here": ROOT, **({"against": options.against.resolve()} if options.against else {})}
    measured: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for i in range(options.rounds + 1):  # the first fills the caches of files
        for side, folder in folders.items() if i % 2 else reversed(folders.items()):
            with tempfile.TemporaryDirectory() as temporary:
                commands: dict[str, tuple[list[str], Path | None]] = {}
                if "help" in options.only:
                    commands |= {f"{name} --help": ([*line, "--help"], None) for name, line in HELP.items()}
                if "training" in options.only:
                    commands |= trainings(Path(temporary))
                for name, (line, written) in commands.items():
                    costs = measure(line, folder, written)
                    if i:
                        measured.setdefault(name, {}).setdefault(side, []).append(costs)
    rows: dict[str, Any] = {}
    for name, sides in measured.items():
        rows[name] = {}
        for side, both in sides.items():
            wall, cpu = (statistics.median(values) for values in zip(*both, strict=True))
            rows[name][side] = {"seconds": wall, "cpu_seconds": cpu, "by_round": both}
        shown = ", ".join(
            f"{side} {row['seconds']:.2f} s ({row['cpu_seconds']:.2f} s CPU)"
            for side, row in rows[name].items()
        )
        print(f"{name}: {shown}", flush=True)
    about = {"rounds": options.rounds, "machine": platform.machine(), "cores": os.cpu_count()}
    earlier = json.loads(RESULT.read_text())["commands"] if RESULT.is_file() else {}
    RESULT.write_text(
        json.dumps({**about, "commands": {**earlier, **rows}}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
