"""Train, evaluate and use CLIP models.

import clipkit
model = clipkit.load("runs/quickstart")
images = clipkit.encode_image(["cat.jpg", "dog.png"], model)        # (2, O) float32, unit norm
texts = clipkit.encode_text(["a photo of a cat"], model)            # (1, O) float32, unit norm
probabilities = clipkit.classify("cat.jpg", ["cat", "dog"], model)  # (1, 2) float32, rows sum to 1

Names that need torch are imported on first use, so that the command line responds to --help and Ctrl-C immediately.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from clipkit.api import (
        caption as caption,
        classify as classify,
        encode_image as encode_image,
        encode_text as encode_text,
        explain as explain,
        load as load,
    )
    from clipkit.errors import (
        CheckpointError as CheckpointError,
        ClipkitError as ClipkitError,
        ConfigError as ConfigError,
        DataError as DataError,
    )
    from clipkit.model.clip import CLIP as CLIP, create as create
    from clipkit.model.tokenizer import tokenize as tokenize
    from clipkit.model.zero_shot import zero_shot_classifier as zero_shot_classifier
    from clipkit.objectives.clip import clip_loss as clip_loss

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "api": ["caption", "classify", "encode_image", "encode_text", "explain", "load"],
        "errors": ["CheckpointError", "ClipkitError", "ConfigError", "DataError"],
        "model.clip": ["CLIP", "create"],
        "model.tokenizer": ["tokenize"],
        "model.zero_shot": ["zero_shot_classifier"],
        "objectives.clip": ["clip_loss"],
    },
)
