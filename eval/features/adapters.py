"""Other libraries: timm's image models as models to score, and a CLIP as a model that mteb scores.

timm's image models with their published weights are for comparison with CLIP on tasks without texts: figure 5 of
the CLIP paper compares with such a model, a ResNet-50 trained with ImageNet's labels. Weights come from the Hugging
Face hub or its local cache. mteb loads the data of its tasks, computes the metrics and writes the results.

Letters in shape comments: B batch, P side of the prepared images, S side of the network's input, W width, N items,
O embedding dimension.
"""

import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipkit import CLIP
from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import convert_hub_errors
from clipkit.formats import model_hash
from clipkit.model import (
    Architecture,
    BagOfWords,
    Preprocess,
    TimmVision,
    create_tokenizer,
    encode_prompts,
    eval_pixels,
    evaluation_mode,
)

if TYPE_CHECKING:
    from mteb.models.abs_encoder import AbsEncoder

TIMM = "timm:"  # prefix of model names
_NO_PICKLES = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # makes torch refuse to execute pickles
_LONGEST = 300  # characters of another library's message
_RESIZE_MODES = {"center": "shortest", "squash": "squash"}  # by timm's crop_mode


@dataclass(frozen=True, kw_only=True)
class CroppedPreprocess(Preprocess):
    """Preprocessing to ``image_size`` pixels; the model crops the center.

    This is timm's evaluation of most models: resize the shorter side to floor(S / crop_pct), then crop the central
    S x S. In two crops, as here, the pixels are the same if the margin is a multiple of 4 (224 of 256, 160 of 168);
    otherwise the crop may be one pixel off along the longer side.

    Attributes:
        crop_size: S.
    """

    crop_size: int


class ImageModel(CLIP):
    """A CLIP with another library's image tower and no text tower; texts raise ``ConfigError``.

    Args:
        trunk: maps normalized images, (B, 3, S, S) float, to pooled features, (B, W).
        name: the model's name, such as "timm:resnet50.tv_in1k".
        tower: the image tower's configuration.
        width: W.
        preprocess: the preprocessing of images.
    """

    def __init__(
        self, trunk: nn.Module, *, name: str, tower: TimmVision, width: int, preprocess: CroppedPreprocess
    ) -> None:
        nn.Module.__init__(self)  # CLIP's own would build two towers
        # an architecture needs a text tower: use the simplest
        self.architecture = Architecture(embed_dim=width, vision=tower, text=BagOfWords())
        self.name, self.origin, self.preprocess, self.dim = name, name, preprocess, width
        self.tokenizer = create_tokenizer(self.architecture)
        self.visual = _CroppingTower(trunk, preprocess.crop_size)
        self.text = _NoTextTower(name)
        self.text_decoder = None
        self.adapters = None
        self.logit_scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.logit_bias = None
        self.register_buffer("_mean", torch.empty(3, 1, 1), persistent=False)
        self.register_buffer("_std", torch.empty(3, 1, 1), persistent=False)
        self.reset_constants()

    def pool_images(self, images: Tensor) -> Tensor:
        features: Tensor = self.visual(self._normalize_colors(images))
        return features


class _CroppingTower(nn.Module):
    def __init__(self, trunk: nn.Module, size: int) -> None:
        super().__init__()
        self.trunk, self.size = trunk, size
        self.head = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Return the features, (B, W), of the central S x S pixels of (B, 3, P, P)."""
        start = round((images.shape[-1] - self.size) / 2)
        end = start + self.size
        features: Tensor = self.trunk(images[..., start:end, start:end])  # (B, 3, S, S) → (B, W)
        return features


class _NoTextTower(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, tokens: Tensor) -> Tensor:
        raise text_tower_error(self.name)


def text_tower_error(name: str) -> ConfigError:
    """Return the error for a task that needs texts."""
    return ConfigError(f"{name} has no text tower: use linear-probe, few-shot or knn (--task of run)")


def load_image_model(source: str, *, device: str | torch.device = "cpu") -> ImageModel:
    """Load a model of timm with its published weights, in evaluation mode.

    Images are preprocessed as in timm's evaluation at the training size (``timm.data.resolve_model_data_config``);
    features are what the model pools before its classifier. As for all models here, gray and palette images become
    RGB after resizing, unlike in timm.

    Args:
        source: ``timm:`` and a name of ``timm.list_pretrained()``; without a tag, timm's default weights are used.
        device: the model's device.

    Raises:
        ConfigError: timm has no such weights, they are not available, or the model is not supported here.
    """
    import timm
    from timm.data.config import resolve_model_data_config

    name = source.removeprefix(TIMM)
    # a name with a scheme would be fetched from any repository
    if not timm.models.is_model_pretrained(name):
        raise ConfigError(f"timm has no weights {name[:200]!r}: {nearest(name, timm.list_pretrained())}")
    known = timm.get_pretrained_cfg(name)
    assert known is not None
    full = ".".join(filter(None, (name.partition(".")[0], known.tag)))
    with _loading(f"{TIMM}{full}"), torch.random.fork_rng(devices=[]):
        # with its classifier: without it, timm would not notice missing weights
        trunk = timm.create_model(full, pretrained=True)
    trunk.eval()
    without_classifier: Any = trunk.reset_classifier
    without_classifier(0)
    resolve: Any = resolve_model_data_config
    data: Mapping[str, Any] = resolve(trunk)
    channels, size, width = data["input_size"]
    prepared = math.floor(size / data["crop_pct"])
    for supported, what in (
        (channels == 3, f"{channels} channels"),
        (size == width, f"{size} x {width} pixels"),
        (data["crop_mode"] in _RESIZE_MODES, f"the crop mode {data['crop_mode']!r}"),
        (prepared >= size, "a border"),
    ):
        if not supported:
            raise ConfigError(
                f"{TIMM}{full} cannot be scored: its images have {what}, which is not supported"
            )
    preprocess = CroppedPreprocess(
        image_size=prepared,
        crop_size=size,
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=data["interpolation"],
        resize_mode=_RESIZE_MODES[data["crop_mode"]],
    )
    with torch.inference_mode():
        features = trunk(torch.zeros(1, 3, size, size))
    if not isinstance(features, Tensor) or features.dim() != 2:
        raise ConfigError(f"{TIMM}{full} cannot be scored: it does not pool its features to one vector")
    model = ImageModel(
        trunk,
        name=f"{TIMM}{full}",
        tower=TimmVision(image_size=size, name=full),
        width=features.shape[1],
        preprocess=preprocess,
    )
    return model.eval().to(device)


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Turn timm's errors about missing or unsuitable weights into ConfigError, and refuse pickles."""
    from safetensors import SafetensorError

    before = os.environ.get(_NO_PICKLES)
    os.environ[_NO_PICKLES] = "1"
    try:
        with convert_hub_errors(source):
            try:
                yield
            except OSError as error:
                raise ConfigError(
                    f"the weights of {source} are not on this machine, and fetching them failed; is there a "
                    "network? "
                    f"{' '.join(str(error).split())[:_LONGEST]}"
                ) from error
            except (ValueError, KeyError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
                message = " ".join(str(error).split())[:_LONGEST]
                raise ConfigError(f"timm cannot load the weights of {source}: {message}") from error
    finally:
        if before is None:
            del os.environ[_NO_PICKLES]
        else:
            os.environ[_NO_PICKLES] = before


# --------------------------------------------------------------------------------------------------------------
# mteb.


def mteb_model(model: CLIP, name: str = "clipkit/model") -> "AbsEncoder":
    """Return a model as ``mteb.evaluate`` takes it, for tasks with images, texts or both.

    Features have unit norm and are compared by their cosine in float32. If an item has an image and a text, its
    feature is their sum, as in mteb's own adapters of CLIP models. Instructions are not used.

    Args:
        model: the model, on its device; call ``mteb.evaluate`` under autocast for another dtype.
        name: OWNER/NAME in mteb's results. The revision is the hash of the weights.

    Raises:
        ConfigError: mteb is not installed, or the name is not OWNER/NAME.
    """
    try:
        from mteb.models.abs_encoder import AbsEncoder
        from mteb.models.model_meta import ModelMeta, ScoringFunction
    except ImportError as error:
        raise ConfigError("mteb_model requires the package mteb: pip install -e '.[mteb]'") from error
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError(f"mteb_model: invalid name {name!r}: expected OWNER/NAME")

    class Adapter(AbsEncoder):  # type: ignore[misc, unused-ignore]
        mteb_model_meta = ModelMeta.create_empty(
            {
                "name": name,
                "revision": model_hash(model),
                "embed_dim": model.dim,
                "max_tokens": model.architecture.text.context_length,
                "modalities": ["image", "text"],
                "similarity_fn_name": ScoringFunction.COSINE,
                "framework": ["PyTorch"],
            }
        )

        def __init__(self) -> None:
            self.model = model

        def encode(self, inputs: Any, **_: Any) -> Tensor:
            """Encode batches of items with ``image`` (PIL images), ``text`` or both: (N, O) float32 on the CPU."""
            features = [_encode_batch(model, batch) for batch in inputs]
            return torch.cat(features) if features else torch.empty(0, model.dim)

    return Adapter()


def _encode_batch(model: CLIP, batch: dict[str, Sequence[Any]]) -> Tensor:
    parts = []
    if "text" in batch:
        parts.append(encode_prompts(model, list(batch["text"])))
    if "image" in batch:
        pixels = torch.stack([eval_pixels(image, model.preprocess) for image in batch["image"]])
        with evaluation_mode(model), torch.inference_mode():
            parts.append(model.encode_image(pixels.to(model.logit_scale.device)))
    if not parts:
        raise DataError(f"mteb gives {', '.join(batch)}: expected image or text")
    return torch.stack([part.float().cpu() for part in parts]).sum(dim=0)
