"""A user's mistake is one line and exit status 1; our own keeps its traceback."""

import os
import subprocess
import sys

import pytest

import clipkit.errors
from clipkit.errors import CheckpointError, ClipkitError, ConfigError, DataError, nearest, run_command

# the module alone: the package would load torch for each process
PROGRAM = f"""
import runpy
globals().update(runpy.run_path({clipkit.errors.__file__!r}))
def main():
    {{}}
run_command(main)
"""


def run(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(body)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_a_users_mistake_is_one_line() -> None:
    done = run("raise DataError('no shard\\n  in \"x\"')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", 'error: no shard in "x"\n')
    done = run("raise ConfigError('steps = 0')", RANK="3")
    assert (done.returncode, done.stderr) == (1, "error (rank 3): steps = 0\n")


def test_our_own_mistake_keeps_its_traceback() -> None:
    done = run("assert False, 'ours'")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "AssertionError: ours" in done.stderr


@pytest.mark.parametrize(("result", "status"), [("None", 0), ("0", 0), ("3", 3)])
def test_the_status_is_what_the_command_returns(result: str, status: int) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(lambda: eval(result))
    assert left.value.code == status


@pytest.mark.parametrize("letters", [1, 1_000_000])
def test_a_reader_that_leaves_early_is_no_error(letters: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with os.fdopen(writing, "w") as output:
        command = [sys.executable, "-c", PROGRAM.format(f"print('x' * {letters})")]
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_all_of_them_can_be_caught_together() -> None:
    for kind in (CheckpointError, ConfigError, DataError):
        assert issubclass(kind, ClipkitError)
    assert not issubclass(ClipkitError, OSError | ValueError)


def test_a_hint_is_the_nearest_name_or_all_names() -> None:
    assert nearest("glyph", ["digits", "glyphs"]) == "did you mean 'glyphs'?"
    assert nearest("zzz", ["glyphs", "digits"]) == "known: digits, glyphs"
