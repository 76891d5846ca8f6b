"""Program run by test_sharded.py under torchrun: optimizers and averaged weights, sharded over ranks."""

import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from clipkit import distributed
from clipkit.config import LockConfig, OptimConfig
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.objectives.clip import clip_loss
from clipkit.training import OPTIMIZERS
from clipkit.training.build import Unfreezing
from clipkit.training.checkpoint import optimizer_tensors, restore_optimizer
from clipkit.training.ema import AveragedWeights
from clipkit.training.optim import make_optimizer, perturbed_weights
from clipkit.training.parallel import complete_gradients, shard, without_values

SHAPE = Architecture(
    embed_dim=7,  # not a multiple of the number of ranks
    vision=VisionTower(image_size=16, patch_size=8, width=18, layers=1, heads=2),
    text=TextTower(width=18, layers=1, heads=2, context_length=8, vocab_size=31),
)
CONFIG = OptimConfig(lr=1e-2, weight_decay=0.3, eps=1e-6)
# AdaFactor rounds its momentum to bfloat16, which amplifies last-bit differences of the sums over ranks
EXACT = replace(CONFIG, name="adafactor", beta1=0.0)
SCALES = (1e-3, 1.0, 50.0, 0.1)  # of the gradients; the third is clipped


def main() -> None:
    torch.set_num_threads(1)
    distributed.start()
    world = distributed.world_size()
    chosen = sys.argv[1:] or list(OPTIMIZERS)
    layouts: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "full": (init_device_mesh("cpu", (world,)), [Shard(0)]),
        "hybrid": (init_device_mesh("cpu", (world, 1), mesh_dim_names=("r", "s")), [Replicate(), Shard(0)]),
    }
    for layout, (mesh, placements) in layouts.items():
        for name in chosen:
            exact = name == "adafactor"
            plain = create(SHAPE, seed=0).to(torch.float64 if exact else torch.float32)
            spread = _spread(deepcopy(plain), mesh, placements)
            difference = compare(plain, spread, name)
            assert difference < (1e-10 if exact else 2e-6), (layout, name, difference)
            restore(spread, name)
            print(f"{layout} {name} the same")
    # Muon rounds to bfloat16, which amplifies last-bit differences of gradients
    trained = [(name, 0.0) for name in chosen if name != "muon"]
    for name, radius in (*trained, ("adamw", 0.05)):
        difference = compare_trainings(name, radius)
        assert difference < 1e-9, (name, radius, difference)
        print(f"training with {name}{' and sam' * bool(radius)} the same")
    distributed.stop()
    sys.stdout.flush()


def _spread(model: CLIP, mesh: DeviceMesh, placements: list[Placement]) -> CLIP:
    """Shard all parameters but the temperature, as FSDP2 does."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim:
                spread = distribute_tensor(parameter.detach(), mesh, placements)
                module.register_parameter(name, nn.Parameter(spread))
    return model


def compare(plain: CLIP, spread: CLIP, name: str) -> float:
    """Largest difference of weights and averaged weights after some updates with the same gradients."""
    models, random = (plain, spread), torch.Generator().manual_seed(1)
    config = EXACT if name == EXACT.name else replace(CONFIG, name=name)
    optimizers = [make_optimizer(model, config) for model in models]
    averages = [AveragedWeights(model, 0.9) for model in models]
    for step, scale in enumerate(SCALES, start=1):
        gradients = [scale * torch.randn(p.shape, generator=random).to(p.dtype) for p in plain.parameters()]
        for model, optimizer, average in zip(models, optimizers, averages, strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = _like(parameter, gradient)
            optimizer.step()
            average.update(step)
    pairs: list[tuple[Tensor, Tensor]] = list(zip(plain.parameters(), spread.parameters(), strict=True))
    with averages[1].applied():
        first = averages[0].tensors()
        pairs += [(first[name], p.detach().clone()) for name, p in spread.named_parameters()]
    return max(float((a - _whole(b)).abs().max().detach()) for a, b in pairs)


def compare_trainings(name: str, radius: float) -> float:
    """Largest difference after training under FSDP2 with unfreezing and evaluations of the averaged weights.

    Args:
        name: the optimizer.
        radius: radius of sharpness-aware minimization; 0 for none.
    """

    def gradients(model: CLIP, images: Tensor, tokens: Tensor) -> None:
        torch.autograd.backward(clip_loss(*model(images, tokens)))
        complete_gradients(model)

    whole = create(SHAPE, seed=0).double()
    models = (whole, without_values(whole).double())
    shard(models[1], whole.state_dict(), "full", device=torch.device("cpu"))
    config = EXACT if name == EXACT.name else replace(CONFIG, name=name)
    optimizers = [make_optimizer(model, config) for model in models]
    averages = [AveragedWeights(model, 0.9) for model in models]
    unfreezing = [Unfreezing(model, LockConfig(unfreeze_every=2)) for model in models]
    averages[1].restore(averages[0].tensors(), origin="the other one")
    random, worst = torch.Generator().manual_seed(1), 0.0
    for step in range(6):
        images = torch.rand(4, 3, 16, 16, generator=random, dtype=torch.float64)
        tokens = torch.randint(1, 31, (4, 8), generator=random)
        scored = []
        for model, optimizer, average, its in zip(models, optimizers, averages, unfreezing, strict=True):
            its.lock_for_step(step)
            optimizer.zero_grad(set_to_none=True)
            gradients(model, images, tokens)
            if radius:
                with perturbed_weights(model, radius):
                    gradients(model, images, tokens)
            optimizer.step()
            average.update(step + 1)
            with average.applied(), torch.no_grad():
                scored.append(torch.cat(model(images, tokens)[:2]))
        worst = max(worst, float((scored[0] - scored[1]).abs().max()))
    pairs = [
        (own, other)
        for (own_name, own), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True)
        # the gradient of the key bias is only rounding error, and these use its sign
        if name not in ("adafactor", "lion") or not own_name.endswith("in_proj_bias")
    ]
    return max(worst, *(float((a - _whole(b)).detach().abs().max()) for a, b in pairs))


def restore(spread: CLIP, name: str) -> None:
    """Assert that an optimizer state that is stored whole and restored gives bit-identical updates."""
    again, random = deepcopy(spread), torch.Generator().manual_seed(2)
    models = (spread, again)
    optimizers = [make_optimizer(model, replace(CONFIG, name=name)) for model in models]
    for restored in (False, True):
        for _ in range(2):
            for parameter, other in zip(*(model.parameters() for model in models), strict=True):
                gradient = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
                parameter.grad, other.grad = _like(parameter, gradient), _like(other, gradient)
            for optimizer in optimizers[: 1 + restored]:
                optimizer.step()
        if not restored:
            again.load_state_dict(spread.state_dict())
            tensors = optimizer_tensors(spread, optimizers[0])
            stored = {key: _whole(value).clone() for key, value in tensors.items()}
            restore_optimizer(again, optimizers[1], stored, origin=Path("stored"))
    for parameter, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(_whole(parameter), _whole(other)), name


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main()
