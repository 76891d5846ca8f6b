"""Low-rank adapters (LoRA; Hu et al. 2021, https://arxiv.org/abs/2106.09685) of the matrices in the towers' blocks.

A matrix W (O, I) becomes W + s · up · down with up (O, r), down (r, I) and s = alpha / r. They are torch
parametrizations, so towers of any library compute with the sum, and W itself is locked. ``up`` starts at 0. One
adapter serves the queries, keys and values that share a matrix.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipkit.errors import ConfigError
from clipkit.model.architectures import STEM, Adapters, TowerArchitecture
from clipkit.model.clip import CLIP

_PART = "parametrizations."
_MATRICES = ("weight", "in_proj_weight")
# trained whole
_HEADS = ("logit_", "masked_head.", "words_head.", "text_decoder.", "image_projections.")


class LowRank(nn.Module):
    """The parametrization of one matrix."""

    def __init__(self, rows: int, columns: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(torch.empty(rank, columns))
        self.up = nn.Parameter(torch.empty(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Return W + s · up · down."""
        return torch.addmm(weight, self.up, self.down, alpha=self.scale)


def add_adapters(model: CLIP, adapters: Adapters, *, seed: int = 0) -> None:
    """Add adapters to a model, in place, and lock everything else but the temperature and heads of local terms.

    Args:
        model: a CLIP without adapters, on the CPU or without values.
        seed: seed of ``down``.
    """
    matrices = _find_matrices(model, adapters)
    greatest = max(min(getattr(module, name).shape) for module, name in matrices)
    if adapters.rank > greatest:
        raise ConfigError(f"lora.rank = {adapters.rank} exceeds the rank of the matrices, at most {greatest}")
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not name.startswith(_HEADS):
            parameter.requires_grad_(False)
    for module, name in matrices:
        weight: Tensor = getattr(module, name)
        rows, columns = weight.shape
        adapter = LowRank(rows, columns, adapters.rank, adapters.alpha / adapters.rank).to(weight.device)
        if not weight.is_meta:
            nn.init.zeros_(adapter.up)
            nn.init.normal_(adapter.down, std=weight.shape[1] ** -0.5, generator=random)
        parametrize.register_parametrization(module, name, adapter, unsafe=True)
    model.adapters = adapters


def merge_adapters(model: CLIP) -> None:
    """Make the sums the weights of the model, in place; without adapters it is unchanged."""
    for module in list(model.modules()):
        for name in list(getattr(module, "parametrizations", ())):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    model.adapters = None


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return _PART in name and not name.endswith(".original")


def adapter_tensors(model: CLIP, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of a model's tensors that its base does not have: adapters, temperature, and heads of terms."""
    if model.adapters is None:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name) or name.startswith(_HEADS)}


def _find_matrices(model: CLIP, adapters: Adapters) -> list[tuple[nn.Module, str]]:
    shape = model.architecture
    matrices = []
    if adapters.image:
        matrices += _find_tower_matrices("image", model.visual, shape.vision)
    if adapters.text and model.text is not None:
        matrices += _find_tower_matrices("text", model.text, shape.text)
    elif adapters.text:
        matrices += _find_tower_matrices("text", model, shape.text, others=("visual.", *_HEADS))
    return matrices


def _find_tower_matrices(
    tower: str, module: nn.Module, kind: TowerArchitecture, *, others: tuple[str, ...] = ()
) -> list[tuple[nn.Module, str]]:
    find_layer = kind.map_layers(module)
    matrices = []
    for name, parameter in module.named_parameters():
        if find_layer is None or name.startswith(others) or find_layer(name) in (None, STEM):
            continue
        path, _, last = name.rpartition(".")
        if last in _MATRICES and parameter.ndim == 2:
            matrices.append((module.get_submodule(path), last))
    if not matrices:
        raise ConfigError(
            f"lora.{tower} = True: the {tower} tower has no blocks with matrices: set it to false"
        )
    return matrices
