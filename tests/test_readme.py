"""README's commands run as README states them: from a clone with no virtual environment, by a newcomer.

These install all of torch into a new environment, so they run where ``CLIPKIT_TEST_README=1`` asks for them;
``.ci/run`` runs the test command itself in this way. What can be checked without installing is checked always.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clipkit.config import load_config
from tests.readme_commands import readme_command

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_commands_are_one_line_that_makes_the_environment_and_installs(name: str) -> None:
    command = readme_command(name)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv")
    assert "pip install" in command
    for program in ("torchrun", "pytest"):
        if program in command:
            assert f".venv/bin/{program}" in command  # nothing has to be activated


def test_the_quickstart_runs_the_default_config() -> None:
    assert readme_command("quickstart").endswith("torchrun train.py")
    load_config(ROOT / "configs" / "quickstart.toml")


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_is_valid(config: Path) -> None:
    assert load_config(config).out == f"runs/{config.stem}"


@pytest.mark.readme
@pytest.mark.skipif(
    os.environ.get("CLIPKIT_TEST_README") != "1", reason="set CLIPKIT_TEST_README=1 to install"
)
def test_the_quickstart_command_as_a_newcomer_runs_it(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["CLIPKIT_CACHE"] = str(tmp_path / "cache")
    command = readme_command("quickstart") + " steps=20 eval.every_steps=10"
    shell = ["bash", "-euo", "pipefail", "-c", command]
    subprocess.run(shell, cwd=clone, env=environment, check=True, timeout=1800)
    assert (clone / "runs" / "quickstart" / "report.html").is_file()
    shutil.rmtree(clone)
