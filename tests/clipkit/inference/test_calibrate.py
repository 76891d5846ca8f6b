"""Tests of calibrated labels: scale, thresholds and errors against plain loops, files, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from webdataset import TarWriter

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import save_model
from clipkit.inference import calibrate as calibration
from clipkit.inference.calibrate import Calibration, calibrate, read_calibration
from eval.metrics.classes import expected_calibration_error
from eval.metrics.intervals import estimate_proportion


def made(
    seed: int, *, images: int = 300, labels: int = 4, several: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Similarities calibrated at a scale of 20, and labels drawn from their probabilities."""
    draw = torch.Generator().manual_seed(seed)
    similarities = torch.randn(images, labels, generator=draw) * 0.1
    if several:
        return similarities, torch.rand(images, labels, generator=draw) < (20 * similarities - 1).sigmoid()
    chosen = torch.multinomial((20 * similarities).softmax(dim=1), 1, generator=draw)
    return similarities, torch.zeros(images, labels, dtype=torch.bool).scatter(1, chosen, True)


def calibrated(similarities: torch.Tensor, targets: torch.Tensor, *, several: bool = False) -> Calibration:
    names = [f"label {number}" for number in range(targets.shape[1])]
    return calibrate(
        similarities, targets, labels=names, templates=["{c}"], weights="w", scale=100.0, several=several
    )


def test_true_scale_and_biases_are_found() -> None:
    similarities, targets = made(0, images=5000)
    found = calibrated(similarities, targets)
    assert found.scale == pytest.approx(20, rel=0.1)
    assert found.biases == pytest.approx([found.biases[0]] * 4, abs=0.3)
    assert found.held_out.ece is not None
    assert found.held_out.ece[1] < 0.03 < 0.2 < found.held_out.ece[0]
    similarities, targets = made(1, images=5000, several=True)
    found = calibrated(similarities, targets, several=True)
    assert found.scale == pytest.approx(20, rel=0.1)
    assert found.biases == pytest.approx([-1] * 4, abs=0.15)


def test_separable_labels_keep_probabilities_below_one_and_reject_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    targets = torch.eye(4, dtype=torch.bool).repeat(24, 1)
    similarities = 0.2 + 0.02 * torch.randn(96, 4, generator=draw) + 0.2 * targets
    found = calibrated(similarities[:48], targets[:48])
    probabilities = found.probabilities(similarities[48:])
    assert 0.9 < probabilities[targets[48:]].min() < probabilities.max() < 0.9999
    assert (probabilities[targets[48:]] >= torch.tensor(found.thresholds).repeat(12)).all()
    assert found.held_out.recall == 1


@pytest.mark.parametrize("several", [False, True])
def test_new_images_reach_the_promised_precision(several: bool) -> None:
    reached, promised = [], []
    others, truth = made(1000, images=5000, several=several)
    for seed in range(10):
        found = calibrated(*made(seed, images=400, several=several), several=several)
        probabilities = found.probabilities(others)
        accepted = probabilities >= torch.tensor(found.thresholds)
        if not several:
            accepted &= probabilities == probabilities.amax(dim=1, keepdim=True)
        reached.append(float((accepted & truth).sum() / accepted.sum()))
        promised.append(found.held_out.low)
    assert 0.87 < sum(reached) / 10 < 0.95
    assert sum(one >= low for one, low in zip(reached, promised, strict=True)) >= 8


@given(st.dictionaries(st.integers(0, 20), st.booleans(), min_size=1), st.floats(0, 1))
def test_threshold_is_the_lowest_with_the_precision(rows: dict[int, bool], target: float) -> None:
    probabilities = torch.tensor([value / 20 for value in rows])
    right = torch.tensor(list(rows.values()))
    reaching = []
    for value in probabilities.tolist():
        above = right[probabilities >= value].tolist()
        if (sum(above) + 1) / (len(above) + 2) >= target:
            reaching.append(value)
    lowest = min(reaching, default=2.0)
    expected = 0.0 if lowest == probabilities.min() else lowest  # all predictions have the precision
    assert calibration._threshold(probabilities, right, target) == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 50))
def test_error_and_interval_equal_those_of_eval(seed: int, count: int) -> None:
    similarities, targets = made(seed, images=count)
    probabilities = (30 * similarities).softmax(dim=1)
    confidence, best = probabilities.max(dim=1)
    right = targets.gather(1, best[:, None])[:, 0]
    error = expected_calibration_error(confidence, right).value
    assert calibration._ece(probabilities, targets) == pytest.approx(error, abs=1e-6)
    hits = int(right.sum())
    assert calibration.wilson_interval(hits, count) == pytest.approx(
        (estimate_proportion(hits, count).low, estimate_proportion(hits, count).high), abs=1e-9
    )


def test_too_few_images_are_rejected() -> None:
    similarities, targets = made(0, images=9)
    with pytest.raises(DataError, match="9 labelled images are too few"):
        calibrated(similarities, targets)
    similarities, targets = made(0, images=50)
    targets[:, 2] = False
    with pytest.raises(DataError, match="'label 2' has 0 of 50"):
        calibrated(similarities, targets)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three shades in folders by label, one of them "none", and a model."""
    out = tmp_path_factory.mktemp("calibrate")
    for place, name in enumerate(("dark", "light", "none")):
        for number in range(12):
            shade = np.random.default_rng([place, number]).integers(80 * place, 80 * place + 60, (16, 16, 3))
            (out / "labelled" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(shade.astype(np.uint8)).save(out / "labelled" / name / f"{number}.png")
    save_model(clipkit.create("ViT-Ti-4-16", seed=0).eval(), out / "model")
    return out


def test_calibrate_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["classify", str(folder / "labelled"), "--model", str(folder / "model")]
    assert dispatch([*command, "--calibrate", str(folder / "labelled"), "--none", "--out", "one.jsonl"]) == 0
    said = capsys.readouterr().err
    assert (
        "wrote calibration.json; 5-fold cross-validation on 36 images: no accepted label, calibration" in said
    )
    assert "note: 2 labels (such as 'dark') with fewer than 30 images: these share a threshold\n" in said
    found = read_calibration(tmp_path / "calibration.json")
    assert dispatch([*command, "--calibrate", str(folder / "labelled"), "--least-precision", "1"]) == 0
    assert (
        "note: 2 labels (such as 'dark') never accepted: no threshold reaches the precision (stored as 2)\n"
        in capsys.readouterr().err
    )
    replace(found, scale=-1.0).write(tmp_path / "calibration.json")
    with pytest.raises(DataError, match=r"not a calibration .* the scale -1 is out of range"):
        read_calibration(tmp_path / "calibration.json")
    found.write(tmp_path / "calibration.json")
    assert found.labels == ("dark", "light") and not found.several
    again = [
        *command,
        "--calibration",
        "calibration.json",
        "--none",
        "--out",
        "two.jsonl",
        "--review",
        "r.html",
    ]
    assert dispatch(again) == 0
    lines = Path("one.jsonl").read_text()
    assert lines == Path("two.jsonl").read_text()
    for line in map(json.loads, lines.splitlines()):
        for label in line["labels"][:1]:
            assert label["probability"] >= found.thresholds[found.labels.index(label["label"])] - 1e-6
    assert Path("r.html").read_text().count("<select") == 36

    for extra, message in (
        (["--none"], "--none needs thresholds"),
        (["--multi-label", "--labels", "a,b"], "--multi-label needs thresholds"),
        ([], "no labels"),
        (["--calibration", "calibration.json", "--labels", "dark,white"], "--labels differ"),
        (["--calibration", "calibration.json", "--multi-label"], "was made without --multi-label"),
        (["--calibration", "calibration.json", "--templates", "a {c}"], "--templates has no effect"),
        (["--calibration", "calibration.json", "--least-precision", "1"], "--least-precision has no effect"),
        (["--labels", "a,b", "--review", "photo.png"], "must be a file name ending in .html"),
    ):
        with pytest.raises(ConfigError, match=message):
            dispatch([*command, *extra])
    save_model(clipkit.create("ViT-Ti-4-16", seed=1).eval(), tmp_path / "other")
    with pytest.raises(ConfigError, match="another model"):
        dispatch([*command[:-1], str(tmp_path / "other"), "--calibration", "calibration.json"])
    with pytest.raises(
        ConfigError,
        match=r"another background, orientation or pixel range \(the defaults; now: values from 0 to 4095 of deep "
        r"images become 0 to 255\): set the same --background, --upright and --pixel-range",
    ):
        dispatch([*again, "--pixel-range", "0,4095"])
    replace(found, decoding=None).write(tmp_path / "calibration.json")
    with pytest.raises(ConfigError, match=r"calibration\.json is of another model, or of another background"):
        dispatch([*again, "--pixel-range", "0,4095"])
    found.write(tmp_path / "calibration.json")
    for text in (
        "",
        "[]",
        '{"scale": 1}',
        "{",
        Path("calibration.json").read_text().replace('"scale": ', '"scale": -1e999, "x": '),
    ):
        Path("damaged.json").write_text(text)
        with pytest.raises(DataError, match=r"damaged\.json is not a calibration"):
            dispatch([*command, "--calibration", "damaged.json"])
    with pytest.raises(DataError, match=r"cannot read missing\.json: No such file"):
        dispatch([*command, "--calibration", "missing.json"])
    for split in ("train", "Test"):
        (tmp_path / "splits" / split).mkdir(parents=True)
    with pytest.raises(DataError, match="splits contains splits, not labels: choose one of them, such as"):
        dispatch([*command, "--calibrate", "splits"])
    (tmp_path / "splits" / "train" / "0.tar").touch()
    (tmp_path / "splits" / "Test" / "0.tar").touch()
    with pytest.raises(DataError, match="splits is a packed dataset: give the folder of images by label"):
        dispatch([*command, "--calibrate", "splits"])


def test_image_in_two_folders_has_both_labels(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("dark", "light"):
        (tmp_path / "labelled" / name).mkdir(parents=True)
        for number in range(8):
            content = (folder / "labelled" / name / f"{number}.png").read_bytes()
            (tmp_path / "labelled" / name / f"{number}.png").write_bytes(content)
    (tmp_path / "labelled" / "dark" / "both.png").write_bytes(
        (tmp_path / "labelled/light/1.png").read_bytes()
    )
    command = ["classify", "labelled", "--model", str(folder / "model"), "--calibrate", "labelled"]
    with pytest.raises(DataError, match="1 image in labelled have several labels: add --multi-label"):
        dispatch(command)
    assert dispatch([*command, "--multi-label", "--out", "labels.csv"]) == 0
    found = read_calibration(tmp_path / "calibration.json")
    assert found.several
    # dark is always accepted, light never
    replace(found, thresholds=(0.0, 2.0)).write(tmp_path / "calibration.json")
    again = [*command[:-2], "--calibration", "calibration.json", "--multi-label", "--out", "labels.jsonl"]
    for top in ("1", "2"):
        capsys.readouterr()
        assert dispatch([*again, "--top", top]) == 0
        lines = [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()]
        assert all([label["label"] for label in line["labels"]] == ["dark"] for line in lines)
        assert "accepted labels" not in capsys.readouterr().err
    replace(found, thresholds=(0.0, 0.0)).write(tmp_path / "calibration.json")
    assert dispatch([*again, "--top", "1"]) == 0
    assert "note: 17 images with more than 1 accepted label: --top K gives more\n" in capsys.readouterr().err
    with TarWriter("labelled/shard.tar") as shard:
        shard.write({"__key__": "a", "png": (tmp_path / "labelled/light/1.png").read_bytes()})
    with pytest.raises(DataError, match="a is not in the folder of a label: expected labelled/LABEL/IMAGE"):
        dispatch([*command, "--multi-label"])
    assert found.held_out.images == 16


def test_images_of_a_calibration_are_counted_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for label in ("dark", "light"):
        Path("labelled", label).mkdir(parents=True)
        for number in range(6):
            shade = (40 if label == "dark" else 200) + number
            color = (shade, shade, shade, 100 if number == 0 else 255)
            Image.new("RGBA", (16, 16), color).save(f"labelled/{label}/{number}.png")
    command = ["classify", "labelled", "--model", str(folder / "model"), "--calibrate", "labelled"]
    assert dispatch([*command, "--out", "one.jsonl"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "transparent" in line]
    assert [line.split(" are ")[0] for line in lines] == ["labelled: 2 of 12 images", "2 of 12 images"]
