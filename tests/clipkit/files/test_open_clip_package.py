"""Tests of the use of open_clip: through a single file, and with the declared versions."""

import ast
import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import clipkit
from clipkit.files.open_clip import config_files, lacks_image_tower, vocabulary_file
from clipkit.model.names import check_names

REPOSITORY = Path(__file__).parents[3]
AUDIO = {"embed_dim": 512, "audio_cfg": {"sample_rate": 48000}, "text_cfg": {"context_length": 77}}
PROGRAM = """
import sys
from clipkit.files.open_clip import published_tags, published_weights

before = {tag: published_weights("ViT-B-32", tag) for tag in published_tags("ViT-B-32")}
assert {"open_clip", "transformers", "torchvision", "timm"}.isdisjoint(sys.modules)
import open_clip

tags = open_clip.list_pretrained_tags_by_model("ViT-B-32")
assert before == {tag: open_clip.get_pretrained_cfg("ViT-B-32", tag) for tag in tags}
open_clip.pretrained._PRETRAINED["mine"] = {"tag": {"url": "x"}}
assert published_tags("mine") == ["tag"]
print(len(before))

from pathlib import Path
from clipkit import create
from clipkit.errors import ConfigError
from clipkit.files.open_clip import config_files

assert Path(open_clip.__file__).is_relative_to(sys.argv[1]), open_clip.__file__
open_clip.add_model_config(sys.argv[2])
assert {"CLAP-made-up", "Registered-made-up"}.isdisjoint(config_files()), "it is listed"
assert {"ViT-B-32", "RN50"} <= config_files().keys()
for name in ("CLAP-made-up", "CLAP-made-up-quickgelu", "Registered-made-up"):
    try:
        create("open_clip:" + name)
    except ConfigError as error:
        print(error)
"""


def imported(file: Path) -> set[str]:
    """The names of the packages that a file imports anywhere, including those passed to ``find_spec``."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("find_spec", "import_module")):
            names |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def test_only_one_file_imports_open_clip() -> None:
    files = [file for room in ("clipkit", "data", "eval") for file in (REPOSITORY / room).rglob("*.py")]
    assert len(files) > 100
    using = [
        file.relative_to(REPOSITORY)
        for file in [*files, REPOSITORY / "train.py"]
        if "open_clip" in imported(file)
    ]
    assert using == [Path("clipkit/files/open_clip.py")]


def test_own_architectures_do_not_read_files_of_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be absent on a machine that only measures training steps."""

    def fail() -> None:
        raise AssertionError("open_clip's configurations were read")

    monkeypatch.setattr("clipkit.model.names.config_files", fail)
    for name in ("ViT-B-32", "ViT-B-32-quickgelu"):
        check_names(name)
    with pytest.raises(AssertionError):
        check_names("RN50")


@pytest.mark.filterwarnings("ignore")  # warnings of open_clip at import
def test_config_files_equal_the_models_of_open_clip() -> None:
    import open_clip

    assert config_files().keys() == set(open_clip.list_models())
    assert vocabulary_file().is_file()
    assert not lacks_image_tower("RN50") and not lacks_image_tower("no such name")


def test_weights_are_looked_up_without_an_import_and_models_without_image_tower_are_not_listed(
    tmp_path: Path,
) -> None:
    """Such models are among the files of open_clip 4, or registered by ``add_model_config``."""
    theirs, ours = vocabulary_file().parent, tmp_path / "site" / "open_clip"
    configs = ours / "model_configs"
    configs.mkdir(parents=True)
    for file in theirs.iterdir():
        if file.name != configs.name:
            (ours / file.name).symlink_to(file)
    for file in config_files().values():
        (configs / file.name).symlink_to(file)
    (configs / "CLAP-made-up.json").write_text(json.dumps(AUDIO))
    registered = tmp_path / "Registered-made-up.json"
    registered.write_text(json.dumps(AUDIO))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(ours), str(registered)],
        env={"PYTHONPATH": f"{ours.parent}:{Path(clipkit.__file__).parents[1]}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tags, listed, quickgelu, registered_only = done.stdout.splitlines()
    assert int(tags) > 10
    lacking = "configuration has no image tower or no text tower"
    assert listed.startswith("name = 'open_clip:CLAP-made-up' ") and lacking in listed
    assert quickgelu.startswith("name = 'open_clip:CLAP-made-up-quickgelu' ") and lacking in quickgelu
    assert registered_only.startswith("name = 'open_clip:Registered-made-up' ")
    assert "is not an architecture of open_clip" in registered_only


def test_declared_versions_are_the_tested_ones() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "open_clip_torch")
    assert needed.specifier.contains(version("open_clip_torch"))
    assert not any(needed.specifier.contains(untested) for untested in ("3.2.0", "4.0.0", "4.1.0", "5.0"))
