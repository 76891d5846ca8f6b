"""Run mteb's tasks on models: mteb loads the data, computes the metrics and writes the results."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import ConfigError, DataError
from clipkit.formats import model_hash
from clipkit.model import encode_prompts, eval_pixels, evaluation_mode

if TYPE_CHECKING:
    from mteb.models.abs_encoder import AbsEncoder


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
            features = [_features(model, batch) for batch in inputs]
            return torch.cat(features) if features else torch.empty(0, model.dim)

    return Adapter()


def _features(model: CLIP, batch: dict[str, Sequence[Any]]) -> Tensor:
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
