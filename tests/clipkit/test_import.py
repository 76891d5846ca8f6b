"""What ``import clipkit`` gives, and what it does not load."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import clipkit
from clipkit.architectures import ARCHITECTURES

PUBLIC = {
    "CLIP", "CheckpointError", "ClipkitError", "ConfigError", "DataError", "classify", "clip_loss", "create",
    "encode_image", "encode_text", "load", "tokenize", "zero_shot_classifier",
}  # fmt: skip
HEAVY = (
    "torchvision", "transformers", "open_clip", "timm", "wandb", "tensorboard", "matplotlib", "PIL", "simplejpeg",
    "ftfy", "tokenizers", "webdataset", "rich", "sklearn", "pyarrow",
)  # fmt: skip


def test_the_contract_is_what_all_says() -> None:
    assert set(clipkit.__all__) == PUBLIC
    assert len(clipkit.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(clipkit, name).__doc__


@pytest.mark.parametrize("module", [one.name for one in pkgutil.iter_modules(clipkit.__path__)])
def test_each_module_says_what_it_gives(module: str) -> None:
    loaded = importlib.import_module(f"clipkit.{module}")
    assert loaded.__doc__
    assert all(hasattr(loaded, name) for name in loaded.__all__)
    assert len(set(loaded.__all__)) == len(loaded.__all__)


def test_importing_loads_nothing_heavy() -> None:
    code = f"import sys, clipkit; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(clipkit.ConfigError) as caught:
        clipkit.create("resnet")
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    with pytest.raises(clipkit.ConfigError, match="did you mean 'ViT-B-32'"):
        clipkit.create("ViT-B/32")
