"""Tests of ``loss.precision``, with TF32 emulated on the CPU: which products use it, and its error."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipkit.batch import Batch
from clipkit.config import LossConfig, load_config
from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP
from clipkit.model.names import create_architecture
from clipkit.objectives import OBJECTIVES
from clipkit.objectives.base import compute_recall
from clipkit.objectives.clip import clip_loss
from clipkit.objectives.siglip import siglip_loss
from clipkit.training.step import TrainingStep

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
PRODUCTS = {
    "mm.default": 0,
    "mm.out": 0,
    "addmm.default": 1,
    "addmm_.default": 1,
}  # index of the first factor


def round_to_tf32(values: Tensor) -> Tensor:
    """Round float32 to the nearest number with 10 bits of mantissa."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class Gpu(TorchDispatchMode):
    """Rounds the factors of a product as a GPU does when TF32 is on, and notes for which shapes it is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: dict[str, list[tuple[int, ...]]] = {"ieee": [], "tf32": [], "none": []}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = PRODUCTS.get(str(func).removeprefix("aten."))
        if first is not None:
            precision = torch.backends.cuda.matmul.fp32_precision
            a, b = args[first : first + 2]
            self.shapes[precision].append((len(a), a.shape[1], b.shape[1]))
            if precision == "tf32":
                args = (*args[:first], round_to_tf32(a), round_to_tf32(b), *args[first + 2 :])
        return func(*args, **(kwargs or {}))


def draw_features(rows: int = 512, dim: int = 256) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    common, images, texts = torch.randn(3, rows, dim, generator=random)
    return F.normalize(images + 0.3 * common, dim=-1), F.normalize(texts + 0.3 * common, dim=-1)


def compute_gradients(loss: str, dtype: torch.dtype, precision: str) -> list[Tensor]:
    """Return a loss and its gradients with respect to images, texts and scale, in float64."""
    images, texts = (features.to(dtype).requires_grad_() for features in draw_features())
    scale = torch.tensor(50.0, dtype=dtype, requires_grad=True)
    if loss == "siglip":
        bias = torch.tensor(-10.0, dtype=dtype)
        value = siglip_loss(images, texts, scale, bias, precision=precision)
    else:
        smoothing = 0.1 * (loss == "smoothed clip")
        value = clip_loss(images, texts, scale, smoothing=smoothing, precision=precision)
    value.backward()
    results = [value.detach(), images.grad, texts.grad, scale.grad]
    return [result.double() for result in results if result is not None]


@pytest.mark.parametrize("loss", ["clip", "smoothed clip", "siglip"])
def test_tf32_has_the_stated_error_and_is_used_for_all_products(loss: str) -> None:
    exact = compute_gradients(loss, torch.float64, "float32")
    for precision, least, most in (("float32", 0.0, 2e-5), ("tf32", 5e-5, 2e-3)):
        with Gpu() as gpu:
            found = compute_gradients(loss, torch.float32, precision)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        assert max(errors) < most
        assert min(errors[1:3]) > least
        # of siglip, the forward pass computes the gradients too
        used = {"float32": "ieee", "tf32": "tf32"}[precision]
        count = 3 if loss == "siglip" else 4
        assert {name: len(shapes) for name, shapes in gpu.shapes.items() if shapes} == {used: count}
        assert torch.backends.cuda.matmul.fp32_precision == "none"


def test_tf32_changes_only_products_of_features() -> None:
    """The towers, and metrics such as recall, keep their precision."""
    shape = create_architecture("ViT-Ti-4-16")
    model = CLIP(shape).initialize()
    rows = 6
    tokens = torch.tensor([[1, 2 + i, shape.text.vocab_size - 1] for i in range(rows)])
    batch = Batch(
        images=torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8),
        tokens=tokens,
        lengths=(3,) * rows,
        ids=torch.arange(rows),
        identities=torch.arange(rows)[:, None],
        first_row=0,
    )
    settings = LossConfig(precision="tf32", dims=(8,))
    step = TrainingStep(shape=shape, objective=OBJECTIVES["clip"](), loss=settings)
    with Gpu() as gpu:
        step.gradients(model, batch, 0)
        images, texts = draw_features(6, 8)
        compute_recall(images, texts)
    dims = (shape.embed_dim, 8)
    forward = [(rows, dim, rows) for dim in dims]
    assert sorted(gpu.shapes["tf32"]) == sorted(
        [*forward, *forward, *((rows, rows, dim) for dim in (*dims, *dims))]
    )
    assert gpu.shapes["ieee"] == [(6, 8, 6)] and gpu.shapes["none"]
    assert replace(settings, precision="float32") == LossConfig(dims=(8,))


def test_objectives_without_such_products_reject_the_setting() -> None:
    message = "loss.precision = 'tf32' is invalid: expected float32 with loss.name=none"
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, ["loss.name=none", "caption.weight=1", "loss.precision=tf32"])
    assert load_config(QUICKSTART, ["loss.precision=tf32"]).loss.precision == "tf32"
