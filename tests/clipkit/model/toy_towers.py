"""Two towers registered from outside the package; as a program, runs ``train.py`` or ``python -m eval``."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import run_command
from clipkit.model import IMAGE_TOWERS, TEXT_TOWERS, ImageArchitecture, TextArchitecture
from clipkit.model.architectures import STEM, Layer

__all__ = ["ToyText", "ToyVision"]


class Cells(nn.Module):
    """Two linear layers on the mean colors of a grid of cells."""

    def __init__(self, cells: int, output_dim: int) -> None:
        super().__init__()
        self.cells = cells
        self.hidden, self.out = nn.Linear(3 * cells**2, 16), nn.Linear(16, output_dim)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) → (B, O)."""
        means = F.adaptive_avg_pool2d(images, self.cells).flatten(1)
        features: Tensor = self.out(torch.relu(self.hidden(means.to(self.hidden.weight.dtype))))
        return features


@dataclass(frozen=True, kw_only=True)
class ToyVision(ImageArchitecture):
    """An own tower that implements the methods for locking and recomputation."""

    image_size: int = 16
    cells: int
    setting = "toy:CELLS"
    native = True
    has_blocks = False

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        return cls(cells=int(value))

    @property
    def description(self) -> str:
        return f"toy of {self.cells} x {self.cells} cells"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> nn.Module:
        return Cells(self.cells, embed_dim)

    def map_layers(self, module: nn.Module) -> Callable[[str], Layer] | None:
        return lambda name: STEM if name.startswith("hidden.") else None


@dataclass(frozen=True, kw_only=True)
class ToyText(TextArchitecture):
    """A tower that defines only how it is built, and inherits all defaults."""

    context_length: int = 12
    width: int
    setting = "toy:WIDTH"

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        return cls(width=int(value))

    def build(self, embed_dim: int, *, quick_gelu: bool) -> nn.Module:
        return nn.Sequential(
            nn.EmbeddingBag(49408, self.width, padding_idx=0), nn.Linear(self.width, embed_dim)
        )


if __name__ == "__main__":
    import eval.__main__
    import train
    from clipkit import distributed
    from clipkit.options import parse_arguments

    IMAGE_TOWERS["toy"] = ToyVision
    TEXT_TOWERS["toy_text"] = ToyText
    program = sys.argv.pop(1)
    main: Callable[[], int] = eval.__main__.main
    if program == "train":
        main = partial(train.main, parse_arguments())  # parse after registration
    run_command(distributed.together(main))
