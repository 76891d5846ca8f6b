"""Image models of timm with their published weights, to be scored beside CLIP by tasks that need no text.

Figure 5 of the CLIP paper compares with such a one: a ResNet-50 trained with ImageNet's labels. Weights come from
the Hugging Face hub, or its cache on this machine.

Letters in shape comments: B batch, P side of the prepared images, S side of what the network takes, W width.
"""

import math
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipkit import CLIP
from clipkit.errors import ConfigError, nearest
from clipkit.files.hub import from_hub
from clipkit.model import Architecture, BagOfWords, TimmVision
from clipkit.model.preprocess import Preprocess
from clipkit.model.tokenizer import tokenizer_of

__all__ = ["TIMM", "CroppedPreprocess", "ImageModel", "load_image_model", "no_text_tower"]

TIMM = "timm:"  # before the name of a model
_ALWAYS_SAFE = (
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's own switch: no pickle is executed, whatever a caller asks
)
_MOST = 300  # letters of another library's message
_RESIZE_MODES = {"center": "shortest", "squash": "squash"}  # timm's crop_mode → ours


@dataclass(frozen=True, kw_only=True)
class CroppedPreprocess(Preprocess):
    """Images are prepared with a margin, ``image_size`` wide, of which the model cuts the middle.

    So timm evaluates most models: the shorter side becomes floor(S / crop_pct), then the middle S x S is cut out.
    In two cuts, as here, that gives the same pixels where the margin is a multiple of 4 (224 of 256, 160 of 168).
    With another margin the two roundings may differ, and the cut lies up to one pixel aside along the longer side.

    Attributes:
        crop_size: S, the side of what is cut out.
    """

    crop_size: int


class ImageModel(CLIP):
    """The image half of a CLIP, whose tower is another library's and whose features are what that tower pools.

    It encodes images as any CLIP does; texts are refused with a ``ConfigError``.

    Args:
        trunk: normalized float images (B, 3, S, S) → (B, W).
        name: what it is called, such as "timm:resnet50.tv_in1k".
        tower: the same for a program.
        width: W.
        preprocess: how images become its input.
    """

    def __init__(
        self, trunk: nn.Module, *, name: str, tower: TimmVision, width: int, preprocess: CroppedPreprocess
    ) -> None:
        nn.Module.__init__(self)  # CLIP's own would build two towers
        # an architecture has two towers; the simplest one stands for that which is not there
        self.architecture = Architecture(embed_dim=width, vision=tower, text=BagOfWords())
        self.name, self.origin, self.preprocess = name, name, preprocess
        self.tokenizer = tokenizer_of(self.architecture)
        self.visual = _CroppingTower(trunk, preprocess.crop_size)
        self.text = _NoTextTower(name)
        self.logit_scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.logit_bias = None
        self.register_buffer("_mean", torch.empty(3, 1, 1), persistent=False)
        self.register_buffer("_std", torch.empty(3, 1, 1), persistent=False)
        self.reset_constants()


class _CroppingTower(nn.Module):
    """(B, 3, P, P) → (B, W), of the middle S x S."""

    def __init__(self, trunk: nn.Module, size: int) -> None:
        super().__init__()
        self.trunk, self.size = trunk, size

    def forward(self, images: Tensor) -> Tensor:
        start = round((images.shape[-1] - self.size) / 2)
        end = start + self.size
        features: Tensor = self.trunk(images[..., start:end, start:end])  # (B, 3, S, S) → (B, W)
        return features


class _NoTextTower(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, tokens: Tensor) -> Tensor:
        raise no_text_tower(self.name)


def no_text_tower(name: str) -> ConfigError:
    """What to say to somebody who asks an image model for what needs texts."""
    return ConfigError(f"{name} has no text tower: ask for linear-probe, few-shot or knn (--task of run)")


def load_image_model(source: str, *, device: str | torch.device = "cpu") -> ImageModel:
    """A model of timm with its published weights, in evaluation mode.

    Images are prepared as timm's evaluation does at the size that the model was trained at
    (``timm.data.resolve_model_data_config``), and features are what the model pools ahead of its classifier. As for
    every model here, grey images and palettes become RGB after resizing, with timm before it.

    Args:
        source: ``timm:`` and a name of ``timm.list_pretrained()``; without a tag timm's default weights are meant.
        device: where to.

    Raises:
        ConfigError: timm has no such weights, they cannot be had, or the model takes or gives what is not
            supported here.
    """
    import timm

    name = source.removeprefix(TIMM)
    # a name with a schema would be fetched from anybody's repository
    if not timm.models.is_model_pretrained(name):
        raise ConfigError(f"timm has no weights {name[:200]!r}: {nearest(name, timm.list_pretrained())}")
    known = timm.get_pretrained_cfg(name)
    assert known is not None
    full = ".".join(filter(None, (name.partition(".")[0], known.tag)))
    with _loading(f"{TIMM}{full}"), torch.random.fork_rng(devices=[]):
        # with its classifier: without one, timm would leave weights that are missing as they were drawn
        trunk = timm.create_model(full, pretrained=True)
    trunk.eval()
    without_classifier: Any = trunk.reset_classifier
    without_classifier(0)
    preprocess = _preprocess(full, trunk)
    tower = TimmVision(image_size=preprocess.crop_size, name=full)
    width = _width(trunk, tower)
    model = ImageModel(trunk, name=f"{TIMM}{full}", tower=tower, width=width, preprocess=preprocess)
    return model.eval().to(device)


def _preprocess(name: str, trunk: nn.Module) -> CroppedPreprocess:
    """What timm's evaluation does at the size that a model was trained at.

    Raises:
        ConfigError: it cannot be done here.
    """
    from timm.data.config import resolve_model_data_config

    resolve: Any = resolve_model_data_config
    data: Mapping[str, Any] = resolve(trunk)
    channels, size, width = data["input_size"]
    mode, interpolation = data["crop_mode"], data["interpolation"]
    prepared = math.floor(size / data["crop_pct"])
    for right, what in (
        (channels == 3, f"{channels} channels"),
        (size == width, f"{size} x {width} pixels"),
        (mode in _RESIZE_MODES, f"the crop mode {mode!r}"),
        (prepared >= size, "a border"),
    ):
        if not right:
            raise ConfigError(
                f"{TIMM}{name} cannot be scored: its images have {what}, which is not supported"
            )
    return CroppedPreprocess(
        image_size=prepared,
        crop_size=size,
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=interpolation,
        resize_mode=_RESIZE_MODES[mode],
    )


def _width(trunk: nn.Module, tower: TimmVision) -> int:
    """W, found by an image of zeros."""
    with torch.inference_mode():
        features = trunk(torch.zeros(1, 3, tower.image_size, tower.image_size))
    if not isinstance(features, Tensor) or features.dim() != 2:
        raise ConfigError(f"{TIMM}{tower.name} cannot be scored: it does not pool its features to one vector")
    return features.shape[1]


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Around timm's loading: its many errors become one line, and no pickle is executed.

    Raises:
        ConfigError: the weights are not stored here and could not be fetched, or do not fit.
    """
    from safetensors import SafetensorError

    before = os.environ.get(_ALWAYS_SAFE)
    os.environ[_ALWAYS_SAFE] = "1"
    try:
        with from_hub(source):
            try:
                yield
            except OSError as error:
                raise ConfigError(
                    f"the weights of {source} are not stored on this machine, and fetching them failed; is there a "
                    f"network? {_one_line(error)}"
                ) from error
            except (ValueError, KeyError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
                raise ConfigError(f"timm cannot load the weights of {source}: {_one_line(error)}") from error
    finally:
        if before is None:
            del os.environ[_ALWAYS_SAFE]
        else:
            os.environ[_ALWAYS_SAFE] = before


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST]
