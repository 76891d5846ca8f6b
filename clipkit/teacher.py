"""A model that is learned from: it encodes every batch along with the one in training (online distillation).

Letters in shape comments: B batch, S side of the pictures, L tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.api import load
from clipkit.encode import model_hash
from clipkit.errors import ConfigError
from clipkit.model import CLIP
from clipkit.objective import Teaching

__all__ = ["Teacher"]


class Teacher:
    """A CLIP in evaluation mode whose weights do not change.

    Args:
        source: whatever ``clipkit.load`` takes.
        student: the model in training, whose tokens the teacher must understand.
        device: where it encodes.
        bf16: whether its towers run in bfloat16.

    Raises:
        ConfigError: it has another tokenizer than the student.
        CheckpointError: it cannot be loaded.

    Attributes:
        fingerprint: changes with its weights, architecture and preprocessing.
    """

    def __init__(self, source: str, student: CLIP, *, device: torch.device, bf16: bool) -> None:
        self._model = load(source).requires_grad_(False)
        self.fingerprint = model_hash(self._model)
        self._model.to(device)
        self._device, self._bf16 = device, bf16
        sample = ["a photo of two cats, 3:4", "Ünï 猫"]
        own, other = self._model.tokenizer(sample), student.tokenizer(sample)
        length = min(own.shape[1], other.shape[1])  # one may take shorter texts
        if not torch.equal(_cut(own, length), _cut(other, length)):
            raise ConfigError(
                f"distill.teacher = {source!r} splits texts in another way than {student.name}: choose one with "
                "CLIP's tokenizer, or store its features and set distill.features"
            )

    def __call__(self, images: Tensor, tokens: Tensor) -> Teaching:
        """What it makes of uint8 pictures (B, 3, S, S), resized to its own size, and of tokens (B, L)."""
        side = self._model.architecture.vision.image_size
        length = self._model.architecture.text.context_length
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            if images.shape[-1] != side:
                resized = F.interpolate(images.float(), (side, side), mode="bicubic", antialias=True)
                images = resized.round_().clamp_(0, 255).to(torch.uint8)
            return Teaching(
                images=self._model.encode_image(images),
                texts=self._model.encode_text(_cut(tokens, length)),
                scale=self._model.logit_scale.detach().exp(),
            )


def _cut(tokens: Tensor, length: int) -> Tensor:
    """Texts of at most ``length`` tokens; a longer one still ends with its end of text, its largest id."""
    if tokens.shape[1] <= length:
        return tokens
    ends = tokens.amax(dim=1)
    cut = tokens[:, :length].clone()
    cut[:, -1] = torch.where(cut.amax(dim=1) == ends, cut[:, -1], ends)
    return cut
