"""Tests of distillation: from a teacher that encodes every batch, and from its stored features.

Each test runs a real ``train.py``.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import clipkit
from clipkit.formats.checkpoint import save_model
from clipkit.model.names import create_architecture, from_open_clip
from tests.small_trainings import (
    Trainings,
    checkpoint,
    digests,
    error_of,
    go_back,
    metrics,
    pairs,
    trainings,
    write_pairs,
)
from tests.test_family import configuration, tokenizer

__all__ = ["pairs", "tokenizer", "trainings"]  # fixtures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    trainings.run(out, "steps=2", "seed=7")
    return out


def complete(folder: Path) -> None:
    """Rewrite a checkpoint's list of file sizes."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "COMPLETE"}
    (folder / "COMPLETE").write_text(json.dumps(sizes))


def losses(out: Path) -> list[float]:
    losses = [line["loss"] for line in metrics(out)]
    assert all(map(math.isfinite, losses))
    return losses


def test_finished_run_as_teacher_resumes_bit_for_bit(
    trainings: Trainings, teacher: Path, tmp_path: Path
) -> None:
    out, settings = tmp_path / "run", ("steps=3", "checkpoint.every_steps=2", f"distill.teacher={teacher}")
    trainings.run(out, *settings, "accumulate=2")
    taught, end = losses(out), digests(out, 3)
    assert not any("teacher" in name for name in load_file(checkpoint(out, 3) / "model.safetensors"))

    go_back(out, 2)
    trainings.run(out, *settings, "accumulate=2")
    assert losses(out) == taught and digests(out, 3) == end
    assert not any("chance" in line for line in metrics(out))  # the loss at chance depends on the teacher


@pytest.mark.long
def test_resume_rejects_changed_teacher(trainings: Trainings, teacher: Path, tmp_path: Path) -> None:
    changing, out = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(teacher, changing)
    settings = ("steps=3", "checkpoint.every_steps=2", f"distill.teacher={changing}")
    trainings.run(out, *settings)
    end = digests(out, 3)
    trainings.run(changing, "steps=3", "seed=7")
    go_back(out, 2)
    error = error_of(trainings.run(out, *settings, status=1))
    assert error.startswith(
        f"error: {out} was trained with another teacher: distill.teacher = '{changing}' has "
    )

    state = checkpoint(out, 2) / "state.json"
    shutil.rmtree(changing)
    shutil.copytree(teacher, changing)
    kept = json.loads(state.read_text())
    assert kept.pop("teacher")
    state.write_text(json.dumps(kept))  # as in checkpoints of earlier versions
    complete(state.parent)
    trainings.run(out, *settings)
    assert digests(out, 3) == end


def test_teacher_with_equal_weights_gives_zero_loss(
    trainings: Trainings, teacher: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trainings.run(
        out, "steps=2", f"model.weights={teacher}", f"distill.teacher={teacher}", "distill.weight=1"
    )
    assert losses(out) == pytest.approx([0, 0], abs=1e-5)


def test_teacher_with_larger_images_and_shorter_texts(trainings: Trainings, tmp_path: Path) -> None:
    larger, out = tmp_path / "larger", tmp_path / "run"
    shape = create_architecture("ViT-Ti-4-16", image_size=24, context_length=6)
    save_model(clipkit.create(shape, seed=3), larger)
    # distillation does not use the bias
    settings = ("model.tokenizer=", "loss.name=siglip", "distill.weight=1", "model.patch_dropout=0.5")
    trainings.run(out, "steps=2", f"distill.teacher={larger}", *settings)
    assert losses(out)[0] > 0


def test_teacher_with_another_tokenizer_prints_one_line_error(
    trainings: Trainings, tokenizer: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    save_model(clipkit.create(from_open_clip(configuration("SigLIP", tokenizer)), seed=0), other)
    error = error_of(trainings.run(tmp_path / "run", f"distill.teacher={other}", status=1))
    assert error.startswith(f"error: distill.teacher = '{other}' has another tokenizer than ViT-test")


@pytest.mark.long
def test_training_with_stored_teacher_features(trainings: Trainings, teacher: Path, tmp_path: Path) -> None:
    images, texts, out = tmp_path / "images", tmp_path / "texts", tmp_path / "run"
    for folder, kind in ((images, ()), (texts, ("--text",))):
        trainings.clipkit(
            "encode", str(trainings.pairs), *kind, "--model", str(teacher), "--out", str(folder), "--quiet"
        )
    settings = ("steps=3", f"distill.features={images}", f"distill.text_features={texts}")
    trainings.run(out, *settings, "distill.scale=20")
    assert len(losses(out)) == 3

    for folder in (images, texts):  # as if another model had encoded them
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "weights": "others"}))
    error = error_of(trainings.run(out, *settings, "distill.scale=20", status=1))
    assert f"was trained with another teacher: distill.features = '{images}' has changed since" in error

    more = write_pairs(tmp_path / "more", samples=60)
    error = error_of(trainings.run(tmp_path / "lacking", *settings, f"data.train={more}", status=1))
    assert "of 60 samples examined have no features in" in error and "clipkit encode" in error
    error = error_of(trainings.run(tmp_path / "half", f"distill.features={images}", status=1))
    assert error.startswith("error: distill.text_features = ''")


def test_softmax_training_keeps_the_bias_of_initial_weights(trainings: Trainings, tmp_path: Path) -> None:
    """The bias is kept and has no effect on the loss."""
    first, second = tmp_path / "sigmoid", tmp_path / "softmax"
    model = clipkit.create("ViT-Ti-4-16", seed=3)
    model.reset_bias()
    save_model(model, first)
    trainings.run(second, "steps=2", f"model.weights={first}")
    after = load_file(checkpoint(second, 2) / "model.safetensors")
    assert after["logit_bias"] == -10 and after["logit_scale"] != model.logit_scale
