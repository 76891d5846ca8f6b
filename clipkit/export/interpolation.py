"""``clipkit interpolate``: weights between those of two models (WiSE-FT, https://arxiv.org/abs/2109.01903).

A model that was fine-tuned on some images may score worse on others; weights between it and the model it started
from lose less, as the paper reports. ``python -m eval`` measures which fraction is best for your own data.
"""

import argparse
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from clipkit.api import load
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import check_free, save_model
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import Tokenizer

__all__ = ["interpolate", "run"]

# texts for which different tokenizers give different tokens: case, accents, numbers, scripts, length
_PROBES = (
    "a photo of a cat",
    "A  Photo, of Zürich's 1,234 cafés &amp; bars!",
    "naïve 鳥の写真 фото 🙂",
    "x" * 40,
    "of " * 300,
)


@torch.no_grad()
def interpolate(first: CLIP, second: CLIP, alpha: float) -> CLIP:
    """Interpolate all weights, the temperature included: (1 − alpha) · first + alpha · second.

    Statistics of batch norms are interpolated too; integer counts are the first model's.

    Args:
        first: determines the device, dtype and tokenizer.
        second: of the same architecture. Determines how transparent and rotated images are treated, which
            fine-tuning may have changed.
        alpha: 0 (the first model) to 1 (the second).

    Raises:
        ConfigError: alpha is out of range, or the models differ in more than their weights.
    """
    _check_alpha(alpha)
    _check_alike(first, second)
    made = deepcopy(first)
    made.preprocess = second.preprocess
    theirs = second.state_dict()
    made.load_state_dict(
        {name: _between(own, theirs[name], alpha) for name, own in first.state_dict().items()}
    )
    made.origin = (
        f"{1 - alpha:g} of {first.origin or 'a model'} and {alpha:g} of {second.origin or 'another'}"
    )
    return made


def _between(own: Tensor, other: Tensor, alpha: float) -> Tensor:
    if not own.is_floating_point():
        return own
    kind = torch.promote_types(own.dtype, torch.float32)
    return torch.lerp(own.to(kind), other.to(own.device, kind), alpha).to(own.dtype)


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and 0 <= alpha <= 1):
        raise ConfigError(f"alpha = {alpha!r} does not fit: 0 (the first model) to 1 (the second)")


def _check_alike(first: CLIP, second: CLIP) -> None:
    what = ""
    if first.architecture != second.architecture:
        what = "architecture"
    elif replace(first.preprocess, background=None, upright=False) != replace(
        second.preprocess, background=None, upright=False
    ):
        what = "preprocessing of images"
    elif not _same_tokens(first.tokenizer, second.tokenizer):
        what = "tokenizer"
    if what:
        names = [model.origin or model.name or "a model" for model in (first, second)]
        raise ConfigError(
            f"{names[0]} and {names[1]} differ in their {what}: only weights of the same model trained further "
            "can be interpolated"
        )


def _same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Compare tokenizers by their tokens where they come from different folders."""
    if type(first) is not type(second):
        return False
    if first == second:
        return True
    a, b = first(_PROBES), second(_PROBES)
    return a.shape == b.shape and bool((a == b).all())


def _folder(alpha: float) -> str:
    """Name of a subfolder: alpha_0.5 for 0.5, alpha_1 for 1.0."""
    return "alpha_" + repr(float(abs(alpha))).removesuffix(".0")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status.

    Raises:
        ClipkitError: a user error.
    """
    for alpha in options.alpha:
        _check_alpha(alpha)
    alphas = list(dict.fromkeys(options.alpha))
    out = _folder_for(options.out)
    places = [out] if len(alphas) == 1 else [out / _folder(alpha) for alpha in alphas]
    for folder in places:
        check_free(folder)
    first, second = (load(source, name=options.name) for source in (options.first, options.second))
    for model in (first, second):
        print(model.origin)
    if first.preprocess != second.preprocess:
        print("transparent and rotated images are treated as by the second model")
    for alpha, folder in zip(alphas, places, strict=True):
        made_from = {"first": first.origin, "second": second.origin, "alpha": alpha}
        save_model(interpolate(first, second, alpha), folder, made_from=made_from)
        print(f"wrote {folder}: {1 - alpha:g} of the first and {alpha:g} of the second")
    return 0


def _folder_for(out: Path) -> Path:
    try:
        return out.expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # contains NUL, or an unknown user
        raise ConfigError(f"cannot create the folder {str(out)[:200]!r}: {error}") from error
