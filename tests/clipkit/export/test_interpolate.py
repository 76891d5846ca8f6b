"""Tests of interpolation between models: exact ends, rejected differences, and the command."""

import json
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import interpolate
from clipkit.formats.checkpoint import save_model
from clipkit.model import Architecture, OpenClipVision, TextTower, VisionTower
from clipkit.model.architectures import Adapters
from clipkit.model.clip import CLIP, create
from clipkit.model.lora import add_adapters
from clipkit.model.tokenizer import ClipTokenizer

TINY = Architecture(
    embed_dim=16,
    vision=VisionTower(image_size=16, patch_size=8, width=16, layers=1, heads=2),
    text=TextTower(width=16, layers=1, heads=2, context_length=16),
)


@pytest.fixture(scope="module")
def two() -> tuple[CLIP, CLIP]:
    first, second = create(TINY, seed=0).eval(), create(TINY, seed=1).eval()
    with torch.no_grad():
        second.logit_scale.fill_(4.0)
    return first, second


@settings(max_examples=10, deadline=None)
@given(alpha=st.floats(0, 1))
def test_interpolated_weights_lie_between(two: tuple[CLIP, CLIP], alpha: float) -> None:
    first, second = two
    made = interpolate(first, second, alpha)
    other = interpolate(second, first, 1 - alpha)
    for name, value in made.state_dict().items():
        a, b = first.state_dict()[name].double(), second.state_dict()[name].double()
        torch.testing.assert_close(value.double(), (1 - alpha) * a + alpha * b, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-6, atol=1e-7)
    assert made.tokenizer == first.tokenizer and made.preprocess == first.preprocess
    images = clipkit.encode_image(torch.zeros(3, 16, 16, dtype=torch.uint8).numpy().transpose(1, 2, 0), made)
    assert float(images.norm()) == pytest.approx(1)


def test_ends_are_bit_identical(two: tuple[CLIP, CLIP]) -> None:
    kept = [{name: value.clone() for name, value in model.state_dict().items()} for model in two]
    for alpha, wanted in ((0.0, kept[0]), (1.0, kept[1])):
        made = interpolate(*two, alpha).state_dict()
        assert all(torch.equal(made[name], value) for name, value in wanted.items())
    for model, before in zip(two, kept, strict=True):  # neither has changed
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_statistics_are_interpolated_and_counts_are_not() -> None:
    vision = OpenClipVision(
        image_size=64, config={"layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "head_width": 8}
    )
    models = [create(replace(TINY, vision=vision), seed=seed) for seed in (0, 1)]
    for number, model in enumerate(models):
        model.visual.get_buffer("bn1.running_mean").fill_(number)
        model.visual.get_buffer("bn1.num_batches_tracked").fill_(5 + number)
    made = interpolate(models[0], models[1], 0.25)
    assert made.visual.get_buffer("bn1.running_mean").unique().tolist() == [0.25]
    assert int(made.visual.get_buffer("bn1.num_batches_tracked")) == 5


def test_background_and_orientation_of_the_second_model_are_used(two: tuple[CLIP, CLIP]) -> None:
    first, _ = two
    tuned = create(TINY, seed=1)
    tuned.preprocess = replace(tuned.preprocess, upright=True, background=(255, 0, 0))
    assert interpolate(first, tuned, 0.5).preprocess == tuned.preprocess


def test_models_that_differ_in_more_than_weights_are_rejected(two: tuple[CLIP, CLIP]) -> None:
    first, _ = two
    wider = create(replace(TINY, embed_dim=8), seed=0)
    with pytest.raises(ConfigError, match="differ in their architecture: only models trained from the same"):
        interpolate(first, wider, 0.5)
    many, few = (create(TINY.replace_size(image_tokens=count), seed=0) for count in (16, 9))
    with pytest.raises(ConfigError, match=r"differ in their largest number of patches \(16 and 9\)"):
        interpolate(many, few, 0.5)
    grey = create(TINY, seed=0)
    grey.preprocess = replace(grey.preprocess, mean=(0.5, 0.5, 0.5))
    with pytest.raises(ConfigError, match="differ in their image preprocessing"):
        interpolate(first, grey, 0.5)
    shorter = create(TINY, seed=0)
    shorter.tokenizer = ClipTokenizer(context_length=9)
    with pytest.raises(ConfigError, match="differ in their tokenizer"):
        interpolate(first, shorter, 0.5)
    for alpha in (-0.1, 1.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"alpha = .* is invalid"):
            interpolate(first, first, alpha)


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(two: tuple[CLIP, CLIP], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("two")
    for name, model in zip("ab", two, strict=True):
        save_model(model, folder / name)
    return str(folder / "a"), str(folder / "b")


def test_single_alpha_writes_a_folder_that_loads(
    stored: tuple[str, str], two: tuple[CLIP, CLIP], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    assert dispatch(["interpolate", *stored, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {out}: 0.5 × the first + 0.5 × the second"
    model = clipkit.load(out)
    wanted = interpolate(*two, 0.5).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    card = json.loads((out / "model.json").read_text())
    assert card["made_from"] == {
        "first": f"clipkit checkpoint {stored[0]}", "second": f"clipkit checkpoint {stored[1]}", "alpha": 0.5,
    }  # fmt: skip
    assert {path.name for path in out.iterdir()} == {"model.json", "model.safetensors"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    mask = os.umask(0o022)
    os.umask(mask)
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


def test_several_alphas_write_a_folder_each(stored: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        dispatch(
            [
                "interpolate",
                *stored,
                "--alpha",
                "0",
                "0.25",
                "1",
                "0.25",
                "0.25000001",
                "-0",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert {path.name for path in out.iterdir()} == {"alpha_0", "alpha_0.25", "alpha_0.25000001", "alpha_1"}
    first, second = (clipkit.load(source).state_dict() for source in stored)
    for name, wanted in (("alpha_0", first), ("alpha_1", second)):
        found = clipkit.load(out / name).state_dict()
        assert all(torch.equal(value, wanted[key]) for key, value in found.items())


def test_more_than_two_models_are_averaged(
    two: tuple[CLIP, CLIP], stored: tuple[str, str], tmp_path: Path
) -> None:
    third = create(TINY, seed=2)
    save_model(third, tmp_path / "c")
    sources, out = [*stored, str(tmp_path / "c")], tmp_path / "out"
    assert dispatch(["interpolate", *sources, "--out", str(out)]) == 0
    for name, value in clipkit.load(out).state_dict().items():
        mean = torch.stack([one.state_dict()[name].double() for one in (*two, third)]).mean(dim=0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    assert json.loads((out / "model.json").read_text())["made_from"] == {
        "mean": [f"clipkit checkpoint {source}" for source in sources]
    }
    with pytest.raises(ConfigError, match="--alpha needs two models"):
        dispatch(["interpolate", *sources, "--alpha", "0.5", "--out", str(tmp_path / "new")])
    with pytest.raises(ConfigError, match="are the same model: name each model once"):
        dispatch(["interpolate", *sources, sources[1], "--out", str(tmp_path / "new")])


def test_unmerged_adapters_are_rejected(two: tuple[CLIP, CLIP]) -> None:
    adapted = create(TINY, seed=1)
    add_adapters(adapted, Adapters(rank=2, alpha=2, image=True, text=True, source="a", hash="b"))
    with pytest.raises(ConfigError, match="has adapters: store and load it"):
        interpolate(two[0], adapted, 0.5)
    with pytest.raises(ConfigError, match="has adapters"):
        interpolate(adapted, two[0], 0.5)


def test_result_can_replace_a_model(two: tuple[CLIP, CLIP]) -> None:
    wanted = interpolate(*two, 0.3).state_dict()
    for number in (0, 1):
        given = [deepcopy(model) for model in two]
        made = interpolate(given[0], given[1], 0.3, into=given[number])
        assert made is given[number]
        assert all(torch.equal(value, wanted[name]) for name, value in made.state_dict().items())
        other = two[1 - number].state_dict()
        assert all(torch.equal(value, other[name]) for name, value in given[1 - number].state_dict().items())


def test_unwritable_folders_are_rejected_before_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for out in ("full", "file", "/"):
        with pytest.raises(ConfigError, match="already exists and is not empty"):
            dispatch(["interpolate", "no", "such", "--out", str(tmp_path / out)])
    with pytest.raises(ConfigError, match="cannot create the folder"):
        dispatch(["interpolate", "no", "such", "--out", str(tmp_path / ("x" * 300))])
    with pytest.raises(ConfigError, match="--alpha: '2' is not a number from 0 to 1"):
        dispatch(["interpolate", "no", "such", "--alpha", "0.5", "2", "--out", str(tmp_path / "new")])
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"


def test_failed_save_leaves_nothing(two: tuple[CLIP, CLIP], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_model(two[0], tmp_path / "file" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
