"""Tests of the dry run: hours agree with published runs, and settings that fit are suggested."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipkit.config import Config, DistillConfig, ModelConfig, load_config
from clipkit.model.architectures import ARCHITECTURES
from clipkit.model.clip import CLIP
from clipkit.training.costs import (
    GPU_MFU,
    GPUS,
    PUBLISHED_MFU,
    Costs,
    Machine,
    cost_table,
    duration,
    published_memory,
    run_costs,
    workloads_of,
)

CONFIGS = Path(__file__).parents[3] / "configs"
A100 = Machine(gpu="A100", memory=80 << 30, peak=312e12, measured=False)
LAPTOP = Machine(gpu="NVIDIA GeForce RTX 4090 Laptop GPU", memory=16 << 30, peak=1e13, measured=True)


def costs_of(
    config: Config,
    world: int,
    machine: Machine = A100,
    mfu: float | None = None,
    *,
    teacher: CLIP | None = None,
) -> Costs:
    works = workloads_of(config, world=world, shard_ranks=min(world, 8), bf16=True, teacher=teacher)
    return run_costs(works, machine, mfu=mfu)


def named(name: str, *settings: str) -> Config:
    return load_config(CONFIGS / f"{name}.toml", settings)


def text_of(costs: Costs) -> str:
    return " ".join(" ".join(cost_table(costs)).split())


L_14 = ("model.name=ViT-L-14", "small.steps=0", "small.image_size=0", "steps=397_785")


@pytest.mark.parametrize(
    ("configs", "gpus", "hours", "mfu"),
    [
        ([named("laion400m_vit_b_32")], 128, 36, 0.10),
        ([named("vit_l_14_336", *L_14)], 400, 50_800 / 400, 0.12),
        ([named("vit_h_14")], 824, 438_984 * 79_104 / 34_608 / 3600, 0.15),
        ([named("clipa_vit_b_16"), named("clipa_vit_b_16_finish")], 8, 48, 0.19),
    ],
)
def test_published_hours_agree_at_the_stated_mfu(
    configs: list[Config], gpus: int, hours: float, mfu: float
) -> None:
    total_hours = sum(costs_of(config, gpus, mfu=1.0).estimate.hours or 0 for config in configs)
    assert round(total_hours / hours, 2) == mfu
    assert PUBLISHED_MFU[0] <= mfu <= PUBLISHED_MFU[1]


def test_lowest_published_mfu_is_assumed_and_reported_by_default() -> None:
    config = named("laion400m_vit_b_32")
    assumed, given = costs_of(config, 128), costs_of(config, 128, mfu=0.4)
    assert assumed.mfu == GPU_MFU == PUBLISHED_MFU[0]
    assert (
        "10% (--mfu) of 312 TFLOP/s are reached, the rate according to its data sheet (published runs"
        in text_of(assumed)
    )
    assert "if loading data is fast enough and 40% (--mfu)" in text_of(given) and "published" not in text_of(
        given
    )


@pytest.mark.parametrize(
    ("config", "gpus", "size"),
    [
        (named("vit_h_14"), 8, 80),
        (named("vit_b_32"), 1, 24),
        (named("vit_b_32", "small.steps=10", "small.image_size=64"), 2, 40),
    ],
)
def test_settings_that_fit_are_suggested(config: Config, gpus: int, size: int) -> None:
    machine = replace(A100, memory=size << 30)
    costs = costs_of(config, gpus, machine)
    assert costs.fits is False and costs.alternatives
    assert f"fits no: A100 has {size} GB, {0.9 * size:.0f} of them usable" in text_of(costs)
    for settings in costs.alternatives:
        assert settings in text_of(costs)
        changed = config
        for setting in settings.split():
            name, _, value = setting.partition("=")
            changed = replace(changed, **{name: type(getattr(config, name))(value)})
        assert costs_of(changed, gpus, machine).fits is True, settings


def test_no_settings_are_suggested_if_none_fit() -> None:
    costs = costs_of(named("vit_b_32"), 1, replace(A100, memory=1 << 30))
    assert costs.fits is False and not costs.alternatives
    assert "try more GPUs" in text_of(costs)


def test_unknown_rate_gives_no_hours() -> None:
    costs = costs_of(named("vit_b_32"), 8, replace(A100, peak=None))
    assert "time not known: the published rates of GPUs are for bf16" in text_of(
        costs
    ) and "hours" not in text_of(costs)


def test_costs_on_cpu_do_not_mention_gpus() -> None:
    cpu = Machine(gpu="", memory=None, peak=1e11, measured=True)
    costs = costs_of(named("quickstart"), 1, cpu)
    text = text_of(costs)
    assert costs.fits is None and "fits" not in text and "GPU" not in text and "CUDA" not in text
    assert "40% (--mfu) of 0.1 TFLOP/s" in text and "measured now" in text


@pytest.mark.parametrize(
    ("config", "gpus", "machine"),
    [
        (named("vit_l_14_336", "steps=400_000_000"), 1024, LAPTOP),
        (named("vit_b_32"), 8, A100),
        (Config(), 1, LAPTOP),
    ],
)
def test_table_has_at_most_80_columns(config: Config, gpus: int, machine: Machine) -> None:
    lines = cost_table(costs_of(config, gpus, machine))
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines), "\n".join(lines)


def test_teacher_costs_memory_and_time() -> None:
    config = Config(model=ModelConfig(name="ViT-B-32"))
    alone = costs_of(config, 1)
    with torch.device("meta"):
        teacher = CLIP(ARCHITECTURES["ViT-B-32"])
    distilled = replace(config, distill=DistillConfig(teacher="elsewhere"))
    taught = costs_of(distilled, 1, teacher=teacher)
    numbers = sum(alone.estimate.parameters.values())
    assert 4 * numbers < taught.estimate.memory.teacher <= 6 * numbers
    assert taught.estimate.memory.total - alone.estimate.memory.total == taught.estimate.memory.teacher
    assert alone.estimate.hours is not None and taught.estimate.hours is not None
    # one more forward pass
    assert taught.estimate.hours == pytest.approx(4 / 3 * alone.estimate.hours, rel=0.02)
    elsewhere = costs_of(distilled, 1)
    assert elsewhere.estimate.work.lacks_teacher and elsewhere.fits is None
    assert "a teacher that is not on this machine: not known" in text_of(elsewhere)


def test_gpus_with_a_rate_have_a_memory_size() -> None:
    assert all(published_memory(name) for name in GPUS)
    assert published_memory("NVIDIA A100-PCIE-40GB") == 40 << 30
    assert published_memory("NVIDIA H100 NVL") == GPUS["H100 NVL"].gb << 30
    assert published_memory("Tesla K80") is None


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0.01, "36 seconds"), (0.2, "12 minutes"), (1.6, "1.6 hours"), (47, "47.0 hours"),
        (106, "106 hours (4.4 days)"), (10_000, "10,000 hours (416.7 days)"),
    ],
)  # fmt: skip
def test_durations_are_in_suitable_units(hours: float, text: str) -> None:
    assert duration(hours) == text
