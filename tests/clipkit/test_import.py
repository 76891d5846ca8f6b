"""Tests of ``import clipkit``: public names, lazy imports, and imports from a clone."""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import clipkit
from clipkit.model.architectures import ARCHITECTURES
from tests.small_trainings import write_pairs

ROOT = Path(clipkit.__file__).parents[1]
PUBLIC = {
    "CLIP", "CheckpointError", "ClipkitError", "ConfigError", "DataError", "caption", "classify", "clip_loss",
    "create", "encode_image", "encode_text", "explain", "load", "tokenize", "zero_shot_classifier",
}  # fmt: skip
HEAVY = (
    "torchvision", "transformers", "open_clip", "timm", "wandb", "tensorboard", "matplotlib", "PIL", "simplejpeg",
    "ftfy", "tokenizers", "webdataset", "rich", "sklearn", "pyarrow",
)  # fmt: skip


def test_public_names_are_exported_and_documented() -> None:
    assert set(clipkit.__all__) == PUBLIC
    assert len(clipkit.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(clipkit, name).__doc__


@pytest.mark.parametrize("module", [one.name for one in pkgutil.iter_modules(clipkit.__path__)])
def test_modules_have_a_docstring_and_unique_exports(module: str) -> None:
    loaded = importlib.import_module(f"clipkit.{module}")
    assert loaded.__doc__
    assert all(hasattr(loaded, name) for name in loaded.__all__)
    assert len(set(loaded.__all__)) == len(loaded.__all__)


def test_import_loads_no_heavy_module() -> None:
    code = f"import sys, clipkit; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_training_imports_only_what_the_first_step_uses(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    arguments = [
        "train.py", "steps=1", "batch_size=4", "model.name=ViT-Ti-4-16", "data.workers=0", "eval.data=[]",
        "log.tensorboard=false", f"data.train={pairs}", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    unused = (
        "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
        "sympy", "timm", "transformers", "open_clip", "wandb", "tensorboard", "matplotlib", "sklearn", "pyarrow",
        "webdataset",
    )  # fmt: skip
    code = (
        "import os, runpy, sys\n"
        "from clipkit.training.metrics import MetricsLog\n"
        "def write(*_):\n"
        f"    print([name for name in {unused} if name in sys.modules], flush=True)\n"
        "    os._exit(0)\n"
        "MetricsLog.write = write\n"
        f"sys.argv = {arguments}\n"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    environment = {**os.environ, "CLIPKIT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(clipkit.ConfigError) as caught:
        clipkit.create("resnet")
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    with pytest.raises(clipkit.ConfigError, match="did you mean 'ViT-B-32'"):
        clipkit.create("ViT-B/32")


class Machine:
    """A folder with a clone named clipkit, and a Python with other packages but without clipkit."""

    def __init__(self, folder: Path) -> None:
        self.parent = folder / "parent"
        self.parent.mkdir()
        self.clone = self.parent / "clipkit"
        self.clone.symlink_to(Path(clipkit.__file__).parents[1])
        others = folder / "others"  # without clipkit, however it is installed
        others.mkdir()
        for one in Path(sysconfig.get_path("purelib")).iterdir():
            if "clipkit" not in one.name:
                (others / one.name).symlink_to(one)
        self.others = str(others)

    def run(self, *arguments: str, path: tuple[str, ...] = (), folder: Path | None = None) -> str:
        """Return Python's output, run in the clone's parent folder; -S excludes the installed packages."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PYTHONPATH"] = os.pathsep.join([self.others, *path])
        program = [getattr(sys, "_base_executable", sys.executable), "-S", *arguments]
        done = subprocess.run(
            program, cwd=folder or self.parent, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


IMPORT = """
import clipkit
from clipkit.errors import ConfigError
assert clipkit.ConfigError is ConfigError and set(clipkit.__all__) <= set(dir(clipkit))
import clipkit.config
print(clipkit.__file__)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_parent_folder_of_a_clone_needs_no_installation(machine: Machine, tmp_path: Path) -> None:
    own = str(machine.clone / "clipkit" / "__init__.py")
    assert machine.run("-c", f"{IMPORT}assert clipkit.load.__module__ == 'clipkit.api'") == own
    assert machine.run("-c", IMPORT, path=(str(machine.clone),)) == own
    assert machine.run("-c", IMPORT, path=(str(machine.parent),), folder=tmp_path) == own
    assert machine.run("-m", "clipkit", "--help").startswith("usage: clipkit")


def test_clone_does_not_hide_an_installed_package(machine: Machine, tmp_path: Path) -> None:
    wheel = tmp_path / "wheel"
    shutil.copytree(
        Path(clipkit.__file__).parent, wheel / "clipkit", ignore=shutil.ignore_patterns("__pycache__")
    )
    assert machine.run("-c", IMPORT, path=(str(wheel),)) == str(wheel / "clipkit" / "__init__.py")
    site = tmp_path / "site"  # an editable installation adds a line to such a file, see pyproject.toml
    site.mkdir()
    (site / "clipkit.pth").write_text(f"{wheel}\n")
    editable = f"import site; site.addsitedir({str(site)!r}); {IMPORT.strip()}"
    assert machine.run("-c", editable) == str(wheel / "clipkit" / "__init__.py")


def test_two_clones_do_not_search_each_other_forever(machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "clipkit").symlink_to(machine.clone)
    own = str(machine.clone / "clipkit" / "__init__.py")
    assert machine.run("-c", IMPORT, path=(str(other),)) == own


def test_torch_distributed_is_used_in_three_files() -> None:
    allowed = {"clipkit/distributed.py", "clipkit/training/parallel.py", "clipkit/training/checkpoint.py"}
    use = re.compile(r"^\s*(import|from) torch\.distributed|^from torch import .*\bdistributed", re.M)
    files = [path for folder in ("clipkit", "data", "eval") for path in (ROOT / folder).rglob("*.py")]
    users = {str(path.relative_to(ROOT)) for path in files if use.search(path.read_text(encoding="utf-8"))}
    assert users == allowed
