"""Train, evaluate and use CLIP models.

import clipkit
model = clipkit.load("runs/quickstart")
images = clipkit.encode_image(["cat.jpg", "dog.png"], model)        # (2, O) float32, unit norm
texts = clipkit.encode_text(["a photo of a cat"], model)            # (1, O) float32, unit norm
probabilities = clipkit.classify("cat.jpg", ["cat", "dog"], model)  # (1, 2) float32, rows sum to 1

Names that need torch are imported on first use, because the command line imports this package before --help.
"""

from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from clipkit.errors import CheckpointError, ClipkitError, ConfigError, DataError

if TYPE_CHECKING:
    from clipkit.api import (
        caption as caption,
        classify as classify,
        encode_image as encode_image,
        encode_text as encode_text,
        explain as explain,
        load as load,
    )
    from clipkit.model.clip import CLIP as CLIP, create as create
    from clipkit.model.tokenizer import tokenize as tokenize
    from clipkit.model.zero_shot import zero_shot_classifier as zero_shot_classifier
    from clipkit.objectives.clip import clip_loss as clip_loss

__version__ = "0.1.0"

_MODULES = {
    "clipkit.api": ("caption", "classify", "encode_image", "encode_text", "explain", "load"),
    "clipkit.model.clip": ("CLIP", "create"),
    "clipkit.model.tokenizer": ("tokenize",),
    "clipkit.model.zero_shot": ("zero_shot_classifier",),
    "clipkit.objectives.clip": ("clip_loss",),
}

__all__ = [
    "CheckpointError",
    "ClipkitError",
    "ConfigError",
    "DataError",
    *chain.from_iterable(_MODULES.values()),
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
