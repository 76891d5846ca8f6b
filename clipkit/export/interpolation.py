"""``clipkit interpolate``: interpolate the weights of two models (WiSE-FT, https://arxiv.org/abs/2109.01903).

A fine-tuned model may score worse on other data than its initial model; interpolated weights lose less. Compare
several values of alpha with ``python -m eval``.
"""

import argparse
import math
from copy import deepcopy
from dataclasses import replace

import torch

from clipkit.api import load
from clipkit.errors import ConfigError
from clipkit.files.patterns import output_folder
from clipkit.formats.checkpoint import check_free, save_model
from clipkit.model.clip import CLIP

__all__ = ["interpolate", "run"]

# texts that distinguish tokenizers: case, accents, numbers, scripts, length
_PROBES = (
    "a photo of a cat",
    "A  Photo, of Zürich's 1,234 cafés &amp; bars!",
    "naïve 鳥の写真 фото 🙂",
    "x" * 40,
    "of " * 300,
)


@torch.no_grad()
def interpolate(first: CLIP, second: CLIP, alpha: float) -> CLIP:
    """Interpolate all weights, including the temperature: (1 − alpha) · first + alpha · second.

    Batch norm statistics are interpolated too; integer counts are taken from the first model.

    Args:
        first: a model; determines the device, dtype and tokenizer of the result.
        second: a model of the same architecture; determines how transparent and rotated images are treated, which
            fine-tuning may have changed.
        alpha: 0 (the first model) to 1 (the second).

    Raises:
        ConfigError: alpha is out of range, or the models differ in more than their weights.
    """
    if not (math.isfinite(alpha) and 0 <= alpha <= 1):
        raise ConfigError(f"alpha = {alpha!r} is invalid: expected 0 (the first model) to 1 (the second)")
    what = ""
    before, after = (replace(one.preprocess, background=None, upright=False) for one in (first, second))
    if first.architecture != second.architecture:
        what = "architecture"
    elif before != after:
        what = "image preprocessing"
    elif type(first.tokenizer) is not type(second.tokenizer):
        what = "tokenizer"
    elif first.tokenizer != second.tokenizer:  # from different folders: compare their tokens
        a, b = first.tokenizer(_PROBES), second.tokenizer(_PROBES)
        what = "" if torch.equal(a, b) else "tokenizer"
    if what:
        names = [model.origin or model.name or "a model" for model in (first, second)]
        raise ConfigError(
            f"{names[0]} and {names[1]} differ in their {what}: only models trained from the same initial weights "
            "can be interpolated"
        )
    made = deepcopy(first)
    made.preprocess = second.preprocess
    weights, theirs = first.state_dict(), second.state_dict()
    for name, own in weights.items():
        if own.is_floating_point():
            kind = torch.promote_types(own.dtype, torch.float32)
            other = theirs[name].to(own.device, kind)
            weights[name] = torch.lerp(own.to(kind), other, alpha).to(own.dtype)
    made.load_state_dict(weights)
    made.origin = (
        f"{1 - alpha:g} of {first.origin or 'a model'} and {alpha:g} of {second.origin or 'another'}"
    )
    return made


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status.

    Raises:
        ClipkitError: a user error.
    """
    alphas = list(dict.fromkeys(options.alpha))
    out = output_folder(options.out)
    folders = [out]
    if len(alphas) > 1:  # such as alpha_0.5, alpha_1
        folders = [out / f"alpha_{float(abs(alpha))!r}".removesuffix(".0") for alpha in alphas]
    for folder in folders:
        check_free(folder)
    first, second = (load(source, name=options.name) for source in (options.first, options.second))
    for model in (first, second):
        print(model.origin)
    if first.preprocess != second.preprocess:
        print("transparent and rotated images are treated as in the second model")
    for alpha, folder in zip(alphas, folders, strict=True):
        made_from = {"first": first.origin, "second": second.origin, "alpha": alpha}
        save_model(interpolate(first, second, alpha), folder, made_from=made_from)
        print(f"wrote {folder}: {1 - alpha:g} × the first + {alpha:g} × the second")
    return 0
