"""Tests of ``import clipkit``: public names, lazy imports, and the folder layout."""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import clipkit
import eval as evaluation
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
    names = getattr(loaded, "__all__", ())  # of packages
    assert all(hasattr(loaded, name) for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("package", [clipkit, evaluation])
def test_names_imported_on_first_use_are_those_that_type_checkers_see(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    typed = next(
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    modules = {str(node.module): tuple(alias.name for alias in node.names) for node in imports}
    assert modules == package._MODULES
    for name in package.__all__:
        assert name in dir(package)
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


def test_import_loads_no_heavy_module() -> None:
    code = f"import sys, clipkit; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        ("clipkit", "--help"),
        ("clipkit", "export", "--to", "nothing"),
        ("data", "pack", "--nothing"),
        ("eval", "run", "--help"),
        ("eval", "zero-shot", "--seed", "-1"),
        ("train.py", "--help"),
        ("train.py", "--profile", "-1"),
    ],
)
def test_help_and_errors_in_options_load_no_torch(command: tuple[str, ...]) -> None:
    program = command[0]
    start = "run_path" if program.endswith(".py") else "run_module"
    code = (
        "import runpy, sys\n"
        f"sys.argv = {list(command)}\n"
        f"try:\n    runpy.{start}({program!r}, run_name='__main__')\n"
        "finally:\n    print([name for name in ('torch', 'numpy', 'msgspec', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if "--help" in command else 1)
    assert done.stdout.splitlines()[-1] == "[]"


def test_training_imports_only_what_the_first_step_uses(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    arguments = [
        "train.py", "steps=1", "batch_size=4", "model.name=ViT-Ti-4-16", "data.workers=0", "eval.data=[]",
        "log.tensorboard=false", f"data.train={pairs}", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    unused = (
        "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
        "sympy", "triton", "timm", "transformers", "open_clip", "wandb", "tensorboard", "matplotlib", "sklearn",
        "pyarrow", "webdataset",
    )  # fmt: skip
    code = (
        "import os, runpy, sys\n"
        "from clipkit.training.log import Log\n"
        "def write(*_, **__):\n"
        f"    print([name for name in {unused} if name in sys.modules], flush=True)\n"
        "    os._exit(0)\n"
        "Log.write = write\n"
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


def test_torch_distributed_is_used_in_three_files() -> None:
    allowed = {"clipkit/distributed.py", "clipkit/training/parallel.py", "clipkit/training/checkpoint.py"}
    use = re.compile(r"^\s*(import|from) torch\.distributed|^from torch import .*\bdistributed", re.M)
    files = [path for folder in ("clipkit", "data", "eval") for path in (ROOT / folder).rglob("*.py")]
    users = {str(path.relative_to(ROOT)) for path in files if use.search(path.read_text(encoding="utf-8"))}
    assert users == allowed


def test_top_level_has_only_the_documented_entries() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git clone")
    entries = {path.partition("/")[0] for path in listing.stdout.splitlines()}
    visible = {name for name in entries if not name.startswith(".") and not name.endswith(".md")}
    assert visible == {"bench", "clipkit", "configs", "data", "eval", "pyproject.toml", "tests", "train.py"}
