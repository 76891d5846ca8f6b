"""Tests of the documentation: commands, options, settings, links and Python examples of all README files.

``test_quickstart_command_on_clean_clone`` installs torch in a new environment, so it only runs with
``CLIPKIT_TEST_README=1``. ``.ci/run`` runs the test command in the same way.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

import clipkit
from clipkit.config import load_config
from clipkit.formats.checkpoint import save_model
from tests.forked import Forked
from tests.readme_commands import code_blocks, readme_command

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / name
    for name in (
        "README.md", "CONTRIBUTING.md", "bench/README.md", "clipkit/README.md", "configs/README.md",
        "configs/launch/README.md", "data/README.md", "eval/README.md",
    )
]  # fmt: skip
HelpOf = Callable[..., str]
OTHER_PROGRAMS = {"bash", "curl", "export", "git", "lint-imports", "mypy", "pip", "pytest", "ruff"}


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_named_command_is_one_line_that_creates_the_environment(name: str) -> None:
    command = readme_command(name)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv")
    assert "pip install" in command
    for program in ("torchrun", "pytest"):
        if program in command:
            assert f".venv/bin/{program}" in command  # no activation required


def test_quickstart_command_runs_the_default_config() -> None:
    assert readme_command("quickstart").endswith("torchrun train.py")
    load_config(ROOT / "configs" / "quickstart.toml")


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_config_is_valid(config: Path) -> None:
    assert load_config(config, count_epoch=lambda _: 40.0).out == f"runs/{config.stem}"


@pytest.fixture(scope="module")
def help_of(forked: Forked) -> HelpOf:
    """Return the output of ``--help`` of a program and sub-command."""

    @cache
    def text(*program: str) -> str:
        ended = forked.run(program[0], [*program[1:], "--help"], {"COLUMNS": "80"})
        assert ended.returncode == 0, f"{shlex.join(program)}: {ended.stderr}"
        return ended.stdout

    return text


def check_train(arguments: list[str], help_of: HelpOf) -> None:
    """Check that the config file and all settings exist and have valid values."""
    assert arguments[0] == "train.py"
    configs = [argument for argument in arguments[1:] if argument.endswith(".toml") and "=" not in argument]
    settings = [argument for argument in arguments[1:] if re.match(r"[a-z_.0-9]+=", argument)]
    config = configs[0] if configs else "configs/quickstart.toml"
    settings = [setting.replace("=N", "=7").replace("-N", "-7") for setting in settings]
    load_config(ROOT / config, settings, count_epoch=lambda _: 40.0)
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in help_of("train.py"), option


def check_command(words: list[str], help_of: HelpOf) -> None:
    """Check that the program, its sub-command and its options exist."""
    program = Path(words[0]).name
    if program in OTHER_PROGRAMS or words[:3] == ["python3", "-m", "venv"]:
        return
    if program == "torchrun":
        words = words[next(i for i, word in enumerate(words) if word in ("train.py", "-m")) :]
        words = ["python", *words]
    if words[:2] == ["python", "train.py"]:
        check_train(words[1:], help_of)
        return
    if words[0] == "clipkit":
        words = ["python", "-m", *words]
    if words[1] != "-m" or words[2].startswith("bench."):
        file = ROOT / (words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1])
        folder = file.with_suffix("")
        text = (folder / "__main__.py" if folder.is_dir() else file).read_text(encoding="utf-8")
    else:
        assert words[2] in ("clipkit", "data", "eval"), words
        text = help_of(f"{words[2]}/__main__.py", words[3])
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", text), f"{option} of {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_exist(page: Path, help_of: HelpOf) -> None:
    text = page.read_text(encoding="utf-8")
    commands = [
        line for block in code_blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    commands += re.findall(r"`(python (?:-m bench\.|bench/)[^`]+)`", text)
    for command in commands:
        for part in command.split(" && "):
            words = shlex.split(re.sub(r"[][…]", " ", part) if "bench" in part else part, comments=True)
            if words:
                check_command(words, help_of)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_link_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in (one for one in targets if not one.startswith("https://")):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_tests_named_in_eval_readme_exist() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "eval").rglob("test_*.py")
    )
    page = (ROOT / "eval" / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(test_\w+…?\w*)`", page):
        pattern = name.replace("…", r"\w*")
        assert re.search(rf"def {pattern}\(", source), name


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "runs" / "quickstart")
    for name in ("seven.png", "a.png", "b.jpg"):
        Image.new("RGB", (20, 24), "teal").save(tmp_path / name)
    blocks = [
        block
        for page in ("README.md", "clipkit/README.md")
        for block in code_blocks((ROOT / page).read_text(encoding="utf-8"), "python")
    ]
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.readme
@pytest.mark.skipif(
    os.environ.get("CLIPKIT_TEST_README") != "1", reason="set CLIPKIT_TEST_README=1 to install"
)
def test_quickstart_command_on_clean_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["CLIPKIT_CACHE"] = str(tmp_path / "cache")
    command = readme_command("quickstart") + " steps=20 eval.every_steps=10"
    shell = ["bash", "-euo", "pipefail", "-c", command]
    subprocess.run(shell, cwd=clone, env=environment, check=True, timeout=1800)
    assert (clone / "runs" / "quickstart" / "report.html").is_file()
    shutil.rmtree(clone)
