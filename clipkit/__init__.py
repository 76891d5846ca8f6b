"""Train, evaluate and use CLIP models.

import clipkit
model = clipkit.load("runs/quickstart")
images = clipkit.encode_image(["cat.jpg", "dog.png"], model)        # (2, O) float32, unit norm
texts = clipkit.encode_text(["a photo of a cat"], model)            # (1, O) float32, unit norm
probabilities = clipkit.classify("cat.jpg", ["cat", "dog"], model)  # (1, 2) float32, rows sum to 1

Names that need torch are imported at first use, so that the command line responds to --help and Ctrl-C at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from clipkit.errors import CheckpointError, ClipkitError, ConfigError, DataError

if TYPE_CHECKING:
    from clipkit.api import classify, encode_image, encode_text, load
    from clipkit.model.clip import CLIP, create
    from clipkit.model.tokenizer import tokenize
    from clipkit.model.zero_shot import zero_shot_classifier
    from clipkit.objectives.clip import clip_loss

__version__ = "0.1.0"

__all__ = [
    "CLIP",
    "CheckpointError",
    "ClipkitError",
    "ConfigError",
    "DataError",
    "classify",
    "clip_loss",
    "create",
    "encode_image",
    "encode_text",
    "load",
    "tokenize",
    "zero_shot_classifier",
]

_HOMES = {
    "CLIP": "model.clip", "classify": "api", "clip_loss": "objectives.clip", "create": "model.clip",
    "encode_image": "api", "encode_text": "api", "load": "api", "tokenize": "model.tokenizer",
    "zero_shot_classifier": "model.zero_shot",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'clipkit' has no attribute {name!r}")
    found: object = getattr(import_module(f"clipkit.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
