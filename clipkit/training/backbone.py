"""Compute the features of locked backbones that ``lock.store`` stores; ``data/backbone.py`` stores them.

Letters: N images or texts, C channels, S image side in pixels, W width of pooled features.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from clipkit.config import LockConfig
from clipkit.formats.checkpoint import describe_tensors
from clipkit.model.clip import CLIP
from clipkit.model.cpu import run_parallel
from clipkit.training.build import projection_prefix, tower_of

# encoded at a time; on a CPU, the activations of a convolution of few images stay in its cache
_ROWS = 256
_IMAGES_ON_CPU, _TEXTS_ON_CPU = 8, 16


@dataclass(frozen=True, kw_only=True)
class LockedBackbones:
    """The backbones of locked towers, in the precision of a training.

    Attributes:
        model: a CLIP on its device, whose locked modules are in evaluation mode.
        bf16: whether the towers run in bfloat16.
    """

    model: CLIP
    bf16: bool

    def identify(self, settings: LockConfig) -> str:
        """Return all that the features that are stored depend on, besides the data.

        Raises:
            ConfigError: the projection of a tower is not known.
        """
        shape = self.model.architecture
        shapes = {"image": shape.vision, "text": shape.text}
        towers = {tower: projection_prefix(self.model, tower) for tower in shapes if settings.stores(tower)}
        tensors = {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if tower_of(name) in towers and not name.startswith(towers[tower_of(name)])
        }
        facts = [
            *(repr(shapes[tower].backbone_settings) for tower in towers),
            f"quick_gelu {shape.quick_gelu}",
            "bf16" if self.bf16 else "fp32",
            describe_tensors(tensors),
        ]
        if "image" in towers:
            facts.append(repr(asdict(self.model.preprocess)))
        if "text" in towers:
            facts.append(self._hash_tokenizer())
        return "\n".join(facts)

    def _hash_tokenizer(self) -> str:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            digest = hashlib.sha256(repr(self.model.tokenizer.store(folder)).encode())
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
        return digest.hexdigest()

    @property
    def _device(self) -> torch.device:
        return self.model.logit_scale.device

    def encode_images(self, images: Tensor) -> Tensor:
        """Compute pooled features (N, W) float32 on the host of uint8 images (N, C, S, S)."""
        rows = _IMAGES_ON_CPU if self._device.type == "cpu" else _ROWS
        return self._encode(self.model.pool_images, images.split(rows))

    def encode_texts(self, texts: Sequence[str]) -> tuple[Tensor, list[bool]]:
        """Compute pooled features (N, W), and whether each text was cut to the context length."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of similar length together
        rows = _TEXTS_ON_CPU if self._device.type == "cpu" else _ROWS
        tokenizer = self.model.tokenizer
        batches = []
        cut = [False] * len(texts)
        for start in range(0, len(order), rows):
            numbers = order[start : start + rows]
            tokens = tokenizer([texts[i] for i in numbers])
            for row, i in enumerate(numbers):
                cut[i] = tokenizer.count_cut([texts[i]], tokens[row : row + 1]) > 0
            batches.append(tokens)
        pooled = self._encode(self.model.pool_texts, batches)
        return torch.empty_like(pooled).index_copy(0, torch.tensor(order), pooled), cut

    def _encode(self, encode: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> Tensor:
        def encode_on_device(batch: Tensor) -> Tensor:
            return encode(batch.to(self._device, non_blocking=True)).float().cpu()

        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self.bf16):
            return torch.cat(list(run_parallel(self.model, encode_on_device, batches)))
