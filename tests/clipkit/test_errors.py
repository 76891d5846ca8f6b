"""Tests of run_command: one-line errors, exit statuses, tracebacks, closed and full outputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision

import clipkit.errors
from clipkit.errors import CheckpointError, ClipkitError, ConfigError, DataError, nearest, run_command

# the module alone: importing the package would load torch in each process
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


def test_user_error_prints_one_line() -> None:
    done = run("raise DataError('no shard\\n  in \"x\"')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", 'error: no shard in "x"\n')
    done = run("raise ConfigError('steps = 0')", RANK="3")
    assert (done.returncode, done.stderr) == (1, "error (rank 3): steps = 0\n")


def test_missing_package_names_the_extra() -> None:
    done = run("sys.modules['h5py'] = None; import h5py")
    assert (done.returncode, done.stderr) == (
        1,
        "error: h5py is not installed: pip install -e '.[formats]'\n",
    )
    assert "ModuleNotFoundError" in run("import unknown_module").stderr


def test_torchvision_of_another_torch_prints_one_line(tmp_path: Path) -> None:
    # as if torch cannot load its compiled operations
    package = tmp_path / "torchvision"
    package.mkdir()
    for path in Path(torchvision.__file__).parent.iterdir():
        if path.suffix != ".so":
            (package / path.name).symlink_to(path)
    done = run("import torchvision", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (
        1,
        "error: torchvision does not match the installed torch: pip install --upgrade torch torchvision\n",
    )


def test_warning_prints_one_line() -> None:
    done = run("import warnings; warnings.warn('no tokenizer')")
    assert (done.returncode, done.stderr) == (0, "note: no tokenizer\n")


def test_internal_error_prints_its_traceback() -> None:
    done = run("assert False, 'ours'")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "AssertionError: ours" in done.stderr


@pytest.mark.parametrize(("result", "status"), [("None", 0), ("0", 0), ("3", 3)])
def test_exit_status_is_the_return_value(result: str, status: int) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(lambda: eval(result))
    assert left.value.code == status


@pytest.mark.parametrize("letters", [1, 1_000_000])
def test_closed_pipe_prints_nothing(letters: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with os.fdopen(writing, "w") as output:
        command = [sys.executable, "-c", PROGRAM.format(f"print('x' * {letters})")]
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment
        )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("open('/nothing/at/all')", "/nothing/at/all: No such file or directory"),
        ("import os; os.link('/nothing', '/else')", "/nothing: /else: No such file or directory"),
        ("raise OSError(28, 'No space left on device')", "No space left on device"),
        ("raise OSError('unreachable')", "unreachable"),
        ("b'\\xff'.decode()", "text cannot be read or written: 'utf-8' codec can't decode byte 0xff"),
        ("print('x', file=open('/dev/full', 'w'), flush=True)", "No space left on device"),
    ],
)
def test_operating_system_error_prints_one_line(body: str, message: str) -> None:
    done = run(body)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_ctrl_c_prints_one_line_and_exits_130() -> None:
    done = run("raise KeyboardInterrupt('all is saved')")
    assert (done.returncode, done.stderr) == (130, "stopped; all is saved\n")
    done = run("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_signal_exits_128_plus_its_number() -> None:
    done = run("raise Stopped(15, 'all is saved')")
    assert (done.returncode, done.stderr) == (143, "stopped; all is saved\n")


def test_ctrl_c_within_exec_exits_130(tmp_path: Path) -> None:
    body = "exec('raise KeyboardInterrupt')"  # as dataclass() does
    (tmp_path / "program.py").write_text(PROGRAM.format(body), encoding="utf-8")
    command = [sys.executable, "-m", "program"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "stopped\n")


@pytest.mark.parametrize(
    ("redirection", "status", "stderr"),
    [
        (">&-", 0, "two\n"),
        ("2>&-", 0, ""),
        (">&- 2>&-", 0, ""),
        (">/dev/full", 1, "two\nerror: No space left on device\n"),
        ("2>/dev/full", 0, ""),
    ],
)
def test_closed_and_full_outputs_do_not_stop_the_command(redirection: str, status: int, stderr: str) -> None:
    body = "print('one – ö'); _print_to_stderr('two')"
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, PROGRAM.format(body)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (status, stderr)


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
)
def test_characters_outside_the_encoding_are_escaped(environment: dict[str, str]) -> None:
    done = run("print('1 \\u2013 \\xf6'); raise DataError('no \\xf6')", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (1, "1 \\u2013 \\xf6\n", "error: no \\xf6\n")


def test_errors_share_a_base_class() -> None:
    for kind in (CheckpointError, ConfigError, DataError):
        assert issubclass(kind, ClipkitError)
    assert not issubclass(ClipkitError, OSError | ValueError)


def test_nearest_suggests_the_closest_name_or_lists_all() -> None:
    assert nearest("glyph", ["digits", "glyphs"]) == "did you mean 'glyphs'?"
    assert nearest("cifar10", ["CIFAR10", "CIFAR100"]) == "did you mean 'CIFAR10'?"
    assert nearest("zzz", ["glyphs", "digits"]) == "known: digits, glyphs"
