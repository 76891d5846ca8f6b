"""Tests of optimizers and schedules: weight decay, rates by depth, equality with reference optimizers."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode

from clipkit.config import OptimConfig
from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.model.processor import has_bfloat16_products
from clipkit.objectives.clip import clip_loss
from clipkit.training import OPTIMIZERS, SCHEDULES, learning_rate
from clipkit.training.build import places
from clipkit.training.checkpoint import optimizer_tensors, restore_optimizer
from clipkit.training.optim import (
    DeviceGated,
    MuonWithAdamW,
    adamw,
    expected_state,
    make_optimizer,
    make_update,
    orthogonalize,
    parameter_groups,
    perturbed_weights,
)

TINY = Architecture(
    embed_dim=16,
    vision=VisionTower(image_size=16, patch_size=8, width=24, layers=2, heads=2),
    text=TextTower(width=16, layers=2, heads=2, context_length=8, vocab_size=50),
)


def test_gains_biases_class_embedding_and_temperature_do_not_decay(tiny: CLIP) -> None:
    config = OptimConfig(lr=1e-3, weight_decay=0.3, beta1=0.8, beta2=0.95, eps=1e-7)
    optimizer = adamw(tiny, config)
    names = {parameter: name for name, parameter in tiny.named_parameters()}
    groups = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert groups.keys() == {0.0, 0.3}
    still = {
        name
        for name in names.values()
        if name.endswith(
            ("bias", "ln_1.weight", "ln_2.weight", "ln_pre.weight", "ln_post.weight", "ln_final.weight")
        )
    } | {"logit_scale", "visual.class_embedding"}
    assert groups[0.0] == still
    assert groups[0.3] == set(names.values()) - still
    assert "token_embedding.weight" in groups[0.3]
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.95), 1e-7, 1e-3)


def test_zero_gradient_only_decays_weights(tiny: CLIP) -> None:
    optimizer = adamw(tiny, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in tiny.named_parameters()}
    for parameter in tiny.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in tiny.named_parameters():
        factor = 0.95 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_are_omitted(tiny: CLIP) -> None:
    tiny.visual.requires_grad_(False)
    optimizer = adamw(tiny, OptimConfig())
    given_ones = {p for group in optimizer.param_groups for p in group["params"]}
    assert given_ones == {p for p in tiny.parameters() if p.requires_grad}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, OptimConfig]:
    lr = draw(st.floats(1e-9, 1e3))
    config = OptimConfig(lr=lr, min_lr=lr * draw(st.floats(0, 1)), warmup=draw(st.integers(0, 60)))
    return draw(st.integers(1, 100)), config


@given(schedule=schedules())
def test_cosine_rate_rises_linearly_and_falls_to_its_floor(
    schedule: tuple[int, OptimConfig],
) -> None:
    steps, config = schedule
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 < rate <= config.lr * (1 + 1e-12) for rate in rates)
    rising, falling = rates[: config.warmup], rates[config.warmup :]
    for step, rate in enumerate(rising):
        assert rate == pytest.approx(config.lr * (step + 1) / config.warmup)
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(falling))
    assert all(rate >= config.min_lr * (1 - 1e-12) for rate in falling)
    if falling:
        assert falling[0] == pytest.approx(config.lr)
    half = (steps - config.warmup) / 2
    if half >= 1 and half == int(half):
        middle = learning_rate(config.warmup + int(half), steps, config)
        assert middle == pytest.approx((config.lr + config.min_lr) / 2)
    assert learning_rate(max(steps, config.warmup), steps, config) == pytest.approx(
        config.min_lr if steps > config.warmup else config.lr, abs=config.lr * 1e-9
    )


# --- rates by depth and tower -------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    layer_decay=st.floats(0.1, 1),
    image_scale=st.sampled_from([0.0, 0.1, 1.0]),
    text_scale=st.sampled_from([1.0, 3.0]),
)
def test_rates_fall_by_depth_and_differ_by_tower(
    layer_decay: float, image_scale: float, text_scale: float
) -> None:
    config = OptimConfig(
        lr=1e-3,
        weight_decay=0.3,
        layer_decay=layer_decay,
        image_lr_scale=image_scale,
        text_lr_scale=text_scale,
    )
    model = create(TINY, seed=0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    where, seen = places(model), set()
    for group in parameter_groups(model, config):
        assert group["lr"] == config.lr * group["lr_scale"]
        for parameter in group["params"]:
            name = names[parameter]
            seen.add(name)
            of_tower = {"image": image_scale, "text": text_scale, "": 1.0}[where[name].tower]
            assert group["lr_scale"] == pytest.approx(of_tower * layer_decay ** where[name].above)
            assert group["weight_decay"] == (0.3 if parameter.ndim >= 2 else 0.0)
    assert seen == set(where)


def test_tower_with_zero_rate_is_not_updated(tiny: CLIP) -> None:
    for name in OPTIMIZERS:
        optimizer = make_optimizer(tiny, OptimConfig(lr=0.1, name=name, image_lr_scale=0))
        before = {key: parameter.detach().clone() for key, parameter in tiny.named_parameters()}
        give_gradients(tiny, 0)
        optimizer.step()
        for key, parameter in tiny.named_parameters():
            assert torch.equal(parameter, before[key]) == key.startswith("visual."), (name, key)


@pytest.mark.parametrize(
    "values", [{"layer_decay": 0.0}, {"layer_decay": 1.1}, {"image_lr_scale": -0.1}, {"text_lr_scale": -1.0}]
)
def test_rates_out_of_range_are_rejected(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="is invalid"):
        OptimConfig(**values)  # type: ignore[arg-type]


def test_make_optimizer_applies_the_configuration(tiny: CLIP) -> None:
    config = OptimConfig(
        name="stable_adamw", layer_decay=0.5, image_lr_scale=0.1, text_lr_scale=2.0,
        schedule="constant", cooldown=5, warmup=0,
    )  # fmt: skip
    optimizer = make_optimizer(tiny, config)
    assert type(optimizer).__name__ == "StableAdamW"
    assert {group["lr_scale"] for group in optimizer.param_groups} >= {0.1, 0.05, 2.0, 0.25}
    for step in range(20):
        rate = learning_rate(step, 20, config)
        assert (rate == config.lr) == (step <= 15)


# --- optimizers by name -------------------------------------------------------------------------------------


def give_gradients(model: CLIP, seed: int, without: tuple[str, ...] = ()) -> None:
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
        parameter.grad = None if name.startswith(without or ("nothing",)) else drawn


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_state_continues_bit_for_bit(name: str) -> None:
    config = OptimConfig(lr=1e-2, name=name, layer_decay=0.7)

    def made(seed: int) -> tuple[CLIP, torch.optim.Optimizer]:
        model = create(TINY, seed=seed)
        return model, make_optimizer(model, config)

    late = ("visual.conv1", "token_embedding", "visual.transformer.resblocks.0.mlp.c_fc", "logit_scale")
    model, optimizer = made(0)
    for step in range(3):
        give_gradients(model, step, without=late)
        optimizer.step()
    stored = load(save(optimizer_tensors(model, optimizer)))  # as read from a file: shares no memory
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    again, other = made(1)
    again.load_state_dict(weights)
    parameters = dict(again.named_parameters())
    for key, value in stored.items():
        owner, _, what = key.rpartition("/")
        assert not owner.startswith(late)
        assert expected_state(other, parameters[owner])[what] == (value.shape, value.dtype)
    restore_optimizer(again, other, stored, origin=Path("stored"), partly=True)
    assert {key.rpartition("/")[0] for key in stored} == {
        key for key in parameters if not key.startswith(late)
    }
    for state in optimizer.state:
        assert set(optimizer.state[state]) == set(expected_state(optimizer, state))
    for step in range(3, 6):
        for trained, its in ((model, optimizer), (again, other)):
            give_gradients(trained, step)  # now for all parameters
            its.step()
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    first, second = optimizer_tensors(model, optimizer), optimizer_tensors(again, other)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_gradient_have_no_update_and_no_state(name: str, tiny: CLIP) -> None:
    optimizer = make_optimizer(tiny, OptimConfig(lr=0.1, name=name))
    before = {key: value.clone() for key, value in tiny.state_dict().items()}
    give_gradients(tiny, 0, without=("visual.",))
    optimizer.step()
    for key, parameter in tiny.named_parameters():
        assert torch.equal(parameter, before[key]) == key.startswith("visual.")
        assert (parameter in optimizer.state) == (not key.startswith("visual."))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_state_dict_round_trips(name: str) -> None:
    models = [create(TINY, seed=0) for _ in range(2)]
    first, second = (make_optimizer(model, OptimConfig(lr=1e-2, name=name)) for model in models)
    give_gradients(models[0], 0)
    first.step()
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))  # torch would share the tensors
    for model, optimizer in zip(models, (first, second), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * group["lr_scale"]
        give_gradients(model, 1)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_lamb_equals_timm() -> None:
    from timm.optim.lamb import Lamb

    config = OptimConfig(name="lamb", lr=1e-2, weight_decay=0.1)
    ours, theirs = create(TINY, seed=0), create(TINY, seed=0)
    mine = make_optimizer(ours, config)
    reference = Lamb(
        parameter_groups(theirs, config), lr=1e-2, betas=(0.9, 0.98), eps=1e-6, max_grad_norm=None
    )
    for step in range(4):
        for model, optimizer in ((ours, mine), (theirs, reference)):
            give_gradients(model, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@settings(max_examples=10, deadline=None)
@given(
    rate=st.floats(1e-5, 1e-1),
    decay=st.floats(0, 3),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
)
def test_lion_equals_its_formula_and_timm(rate: float, decay: float, betas: tuple[float, float]) -> None:
    from timm.optim.lion import Lion

    beta1, beta2 = betas
    config = OptimConfig(name="lion", lr=rate, weight_decay=decay, beta1=beta1, beta2=beta2, layer_decay=0.7)
    ours, theirs, plain = (create(TINY, seed=0) for _ in range(3))
    plain.double()
    optimizers = [make_optimizer(ours, config), Lion(parameter_groups(theirs, config), betas=betas)]
    groups = parameter_groups(plain, config)
    averages = {parameter: torch.zeros_like(parameter) for parameter in plain.parameters()}
    for step in range(4):
        for model in (ours, theirs, plain):
            give_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for group in groups:
                for weight in group["params"]:
                    average, gradient = averages[weight], weight.grad
                    direction = torch.sign(beta1 * average + (1 - beta1) * gradient)
                    weight.sub_(group["lr"] * (direction + group["weight_decay"] * weight))
                    average.mul_(beta2).add_((1 - beta2) * gradient)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    for weight, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 3])
def test_muon_equals_torch_for_block_matrices_and_adamw_for_the_rest(
    threads: int, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    config = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1)
    ours, theirs = create(TINY, seed=0), create(TINY, seed=0)
    mine = make_optimizer(ours, config)
    endings = ("in_proj_weight", "out_proj.weight", "c_fc.weight", "c_proj.weight")
    matrices = [
        p for name, p in theirs.named_parameters() if ".resblocks." in f".{name}" and name.endswith(endings)
    ]
    chosen = {id(p) for p in matrices}
    others: list[dict[str, Any]] = [
        {**group, "params": [p for p in group["params"] if id(p) not in chosen]}
        for group in parameter_groups(theirs, config)
    ]
    reference: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, fused=True),
    )
    assert len(matrices) == 16
    for step in range(3):
        give_gradients(ours, step)
        mine.step()
        give_gradients(theirs, step)
        for optimizer in reference:
            optimizer.step()
    # without products in bfloat16, ours are more exact than torch's
    tolerance = 0.0 if has_bfloat16_products() else 3e-3
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(("momentum", "error"), [(0.9, 2e-4), (0.0, 1e-12)])
def test_adafactor_equals_its_formula(tiny: CLIP, momentum: float, error: float) -> None:
    ours, theirs = tiny.double(), deepcopy(tiny).double()
    config = OptimConfig(name="adafactor", lr=1e-2, weight_decay=0.3, beta1=momentum)
    optimizer = make_optimizer(ours, config)
    decays = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    rows: dict[int, torch.Tensor] = {}
    columns: dict[int, torch.Tensor] = {}
    squares: dict[int, torch.Tensor] = {}
    means: dict[int, torch.Tensor] = {}
    for step in range(1, 5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        beta = min(0.999, 1 - step**-0.8)
        with torch.no_grad():
            for number, (own, other) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
                assert other.grad is not None
                square = other.grad**2 + 1e-30
                if other.ndim == 2 and min(other.shape) >= 16:
                    wide = other.shape[1] >= other.shape[0]  # rows are means over the larger dimension
                    r, c = (
                        square.mean(1 if wide else 0, keepdim=True),
                        square.mean(0 if wide else 1, keepdim=True),
                    )
                    rows[number] = beta * rows.get(number, 0) + (1 - beta) * r
                    columns[number] = beta * columns.get(number, 0) + (1 - beta) * c
                    second = rows[number] * columns[number] / rows[number].mean()
                else:
                    squares[number] = beta * squares.get(number, 0) + (1 - beta) * square
                    second = squares[number]
                update = other.grad / second.sqrt()
                if momentum:
                    mean = means.get(number, torch.zeros_like(update).bfloat16())
                    means[number] = mean.lerp(update.bfloat16(), 0.1)
                    update = means[number].double()
                other.sub_(1e-2 * decays[id(own)] * other + 1e-2 * update)
                # with momentum, results may differ by a bfloat16 rounding step
                torch.testing.assert_close(own, other, rtol=0, atol=error)


def test_optimizer_and_schedule_names_are_registry_entries() -> None:
    for names, setting in ((OPTIMIZERS, "name"), (SCHEDULES, "schedule")):
        for name in names:
            OptimConfig(**{setting: name})  # type: ignore[arg-type]
        closest = next(iter(names))
        with pytest.raises(ConfigError, match=f"optim.{setting} = 'other' is unknown: known: "):
            OptimConfig(**{setting: "other"})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"did you mean '{closest}'"):
            OptimConfig(**{setting: f"{closest}s"})  # type: ignore[arg-type]


# --- other schedules ----------------------------------------------------------------------------------------


@given(schedule=schedules(), cooldown=st.integers(0, 120), longer=st.integers(0, 50))
def test_constant_rate_falls_linearly_at_the_end(
    schedule: tuple[int, OptimConfig], cooldown: int, longer: int
) -> None:
    steps, config = schedule
    floor = config.min_lr if cooldown else 0.0  # a rate that never falls has no floor
    constant = replace(config, schedule="constant", cooldown=cooldown, min_lr=floor)

    def rate(step: int, of: int = steps) -> float:
        return learning_rate(step, of, constant)

    begin = max(config.warmup, steps - cooldown)
    for step in range(steps):
        if step < config.warmup:
            assert rate(step) == learning_rate(step, steps, config)
        elif step <= begin:
            assert rate(step) == pytest.approx(config.lr)
            assert rate(step, steps + longer) == rate(step)  # a longer run is equal up to here
        else:
            left = (steps - step) / (steps - begin)
            assert rate(step) == pytest.approx(config.min_lr + (config.lr - config.min_lr) * left)


@given(schedule=schedules())
def test_linear_rate_falls_evenly(schedule: tuple[int, OptimConfig]) -> None:
    steps, config = schedule
    linear = replace(config, schedule="linear")
    rates = [learning_rate(step, steps, linear) for step in range(config.warmup, steps)]
    fall = (config.lr - config.min_lr) / max(1, steps - config.warmup)
    assert all(a - b == pytest.approx(fall, abs=config.lr * 1e-9) for a, b in pairwise(rates))
    if rates:
        assert rates[0] == pytest.approx(config.lr)


@given(schedule=schedules(), cooldown=st.integers(0, 120))
def test_rsqrt_rate_is_halved_after_four_warmups(schedule: tuple[int, OptimConfig], cooldown: int) -> None:
    steps, config = schedule
    warmup = max(1, config.warmup)
    rsqrt = replace(config, schedule="rsqrt", warmup=warmup, min_lr=0.0, cooldown=0)
    for step in range(warmup, steps):
        assert learning_rate(step, steps, rsqrt) == pytest.approx(config.lr * (warmup / step) ** 0.5)
    assert learning_rate(4 * warmup, 5 * warmup, rsqrt) == pytest.approx(config.lr / 2)
    cooled = replace(rsqrt, cooldown=cooldown)
    begin = max(warmup, steps - cooldown)
    for step in range(begin, steps):
        level = learning_rate(begin, steps, rsqrt) if begin < steps else 0.0
        assert learning_rate(step, steps, cooled) == pytest.approx(level * (steps - step) / (steps - begin))


def test_head_decay_applies_to_projections_only(tiny: CLIP) -> None:
    groups = parameter_groups(tiny, OptimConfig(weight_decay=0.1, head_decay=3.0))
    of = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    strong = {name for name, parameter in tiny.named_parameters() if of[id(parameter)] == 3.0}
    assert strong == {"visual.proj", "text_projection"}
    plain = {name for name, parameter in tiny.named_parameters() if of[id(parameter)] == 0.1}
    assert plain == {name for name, parameter in tiny.named_parameters() if parameter.ndim >= 2} - strong


def test_sam_gradients_equal_those_of_perturbed_weights_and_weights_are_restored(tiny: CLIP) -> None:
    model, random = tiny.double().train(), torch.Generator().manual_seed(0)
    side, length = model.architecture.vision.image_size, model.architecture.text.context_length
    images = torch.rand(4, 3, side, side, generator=random, dtype=torch.float64)
    tokens = torch.randint(1, 90, (4, length), generator=random)

    def loss(other: CLIP) -> torch.Tensor:
        return clip_loss(*other(images, tokens))

    torch.autograd.backward(loss(model))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    norm = torch.cat([parameter.flatten() for parameter in first.values()]).norm()
    reference = deepcopy(model)
    reference.zero_grad()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.add_(0.1 * first[name] / norm)
    torch.autograd.backward(loss(reference))
    with perturbed_weights(model, 0.1):
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.autograd.backward(loss(model))
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, before[name])
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
        assert not torch.equal(ours.grad, first[name])


@pytest.mark.parametrize("shape", [(5, 24, 72), (4, 96, 24)])
def test_matrices_together_equal_each_alone_up_to_bfloat16(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = orthogonalize(matrices)
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in matrices])
    assert (together - alone).norm() / alone.norm() < 0.01


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_skipped_updates_change_nothing(name: str) -> None:
    config = OptimConfig(name=name, lr=1e-2, weight_decay=0.1)
    ours, theirs = create(TINY, seed=0), create(TINY, seed=0)
    mine, reference = make_optimizer(ours, config), make_optimizer(theirs, config)
    for step, is_skipped in enumerate((False, True, False, False, True)):
        give_gradients(ours, step)
        if is_skipped:
            for parameter in ours.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
        else:
            give_gradients(theirs, step)
            reference.step()
        make_update(mine, name, skip=torch.tensor(is_skipped))
        state = optimizer_tensors(ours, mine)
        for key, value in optimizer_tensors(theirs, reference).items():
            assert torch.equal(state[key], value), (step, key)
        for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(parameter, expected)


class NoReads(TorchDispatchMode):
    """Fails if the host reads a tensor, for which it would wait on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["lion", "muon"])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_updates_are_decided_on_the_device(name: str, is_skipped: bool) -> None:
    config = OptimConfig(name=name, lr=1e-2, weight_decay=0.1)
    ours, theirs = create(TINY, seed=0), create(TINY, seed=0)
    mine, reference = make_optimizer(ours, config), make_optimizer(theirs, config)
    assert isinstance(mine, DeviceGated)
    for step in range(2):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        for optimizer in (mine, reference):
            optimizer.step()
    give_gradients(theirs, 2)
    if not is_skipped:
        reference.step()
    give_gradients(ours, 2)
    if isinstance(mine, MuonWithAdamW):  # torch's AdamW reads the number of steps, which is on the host
        mine._adamw = None
    chosen = [group for group in mine.param_groups if group.get("matrices", True)]
    with torch.no_grad(), NoReads():  # type: ignore[no-untyped-call]
        for parameter in (parameter for group in chosen for parameter in group["params"]):
            if is_skipped:
                parameter.grad.fill_(torch.inf)
        mine.update(torch.tensor(is_skipped))
    names = {id(parameter): name for name, parameter in ours.named_parameters()}
    expected, state = dict(theirs.named_parameters()), optimizer_tensors(theirs, reference)
    for parameter in (parameter for group in chosen for parameter in group["params"]):
        key = names[id(parameter)]
        assert torch.equal(parameter, expected[key])
        for kind, value in mine.state[parameter].items():
            assert torch.equal(value, state[f"{key}/{kind}"])


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 5, 5)])
def test_orthogonalize_gives_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.shape == (shape[0], min(shape[1:]))
    assert values.min() > 0.5 and values.max() < 1.3


@given(rate=st.floats(1e-4, 1e-1), momentum=st.floats(0, 0.95), decay=st.floats(0, 0.5))
@settings(max_examples=10)
def test_sgd_equals_its_formula(rate: float, momentum: float, decay: float) -> None:
    model, plain = create(TINY, seed=0), create(TINY, seed=0)
    config = OptimConfig(name="sgd", lr=rate, min_lr=0, beta1=momentum, weight_decay=decay)
    optimizer = make_optimizer(model, config)
    velocities = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for step in range(3):
        give_gradients(model, step)
        give_gradients(plain, step)
        optimizer.step()
        with torch.no_grad():
            for parameter, velocity in zip(plain.parameters(), velocities, strict=True):
                assert parameter.grad is not None
                gradient = parameter.grad + (decay if parameter.ndim > 1 else 0) * parameter
                velocity.mul_(momentum).add_(gradient)
                parameter.sub_(rate * velocity)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-7)
