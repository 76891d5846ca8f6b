"""Trainings in which a source has an image projection of its own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clipkit
from tests.small_trainings import Trainings, checkpoint, error_of, metrics, pairs, trainings, write_pairs

__all__ = ["pairs", "trainings"]  # fixtures

PROJECTION = "image_projections.0"


@pytest.fixture(scope="module")
def both(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    replayed = write_pairs(tmp_path_factory.mktemp("more") / "replayed", 12)
    return json.dumps([str(pairs), str(replayed)])


@pytest.mark.slow
def test_each_source_trains_its_projection_and_the_run_resumes(
    both: str, trainings: Trainings, tmp_path: Path
) -> None:
    settings = (
        f"data.train={both}", "data.weights=[3,1]", 'model.projections=["image:replayed"]', "steps=4",
        "model.tokenizer=",  # open_clip's format stores only CLIP's
    )  # fmt: skip
    saving = ("checkpoint.every_steps=2",)
    trainings.run(tmp_path / "whole", *settings, *saving)
    tensors = load_file(checkpoint(tmp_path / "whole", 4) / "model.safetensors")
    assert not torch.equal(tensors[PROJECTION], tensors["visual.proj"])

    # images of one source alone do not change the projection of the other
    head = ("lock.image=1", "lock.text=all", "optim.weight_decay=0")
    trainings.run(tmp_path / "rare", *settings, *head, "data.weights=[1e6,1]", *saving)
    trainings.run(tmp_path / "often", *settings, *head, "data.weights=[1,1e6]", *saving)
    rare = load_file(checkpoint(tmp_path / "rare", 4) / "model.safetensors")
    often = load_file(checkpoint(tmp_path / "often", 4) / "model.safetensors")
    assert torch.equal(rare[PROJECTION], often["visual.proj"])
    assert not torch.equal(rare["visual.proj"], often["visual.proj"])
    assert not torch.equal(rare[PROJECTION], often[PROJECTION])

    # two ranks compute the same losses, and a run that is continued the same weights
    trainings.run_ranks(2, tmp_path / "ranks", *settings)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("whole", "ranks")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    trainings.run(tmp_path / "half", *settings, *saving)
    shutil.rmtree(checkpoint(tmp_path / "half", 4))
    trainings.run(tmp_path / "half", *settings, *saving)
    resumed = load_file(checkpoint(tmp_path / "half", 4) / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in tensors.items())

    # images are encoded with the image tower's projection, and exports have no other
    model = clipkit.load(tmp_path / "whole")
    image = torch.zeros(1, 3, 16, 16)
    features = model.encode_image(image)
    model.set_projections(())
    assert torch.equal(model.encode_image(image), features)
    trainings.clipkit("export", str(tmp_path / "whole"), str(tmp_path / "export"), "--to", "open_clip")
    exported = load_file(tmp_path / "export" / "open_clip_model.safetensors")
    assert not any("projections" in name for name in exported)


@pytest.mark.slow
def test_projections_start_as_that_of_the_weights(both: str, trainings: Trainings, tmp_path: Path) -> None:
    trainings.run(tmp_path / "first", "steps=1", "checkpoint.every_steps=1")
    projection = load_file(checkpoint(tmp_path / "first", 1) / "model.safetensors")["visual.proj"]
    settings = (
        f"data.train={both}",
        'model.projections=["image:replayed"]',
        f"model.weights={tmp_path / 'first'}",
    )
    for name, more in (("whole", ()), ("tower", ("model.new_head=true", "model.name=ViT-test"))):
        trainings.run(tmp_path / name, *settings, *more, "steps=1", "optim.lr=1e-12")
        tensors = load_file(checkpoint(tmp_path / name, 1) / "model.safetensors")
        assert torch.allclose(tensors[PROJECTION], projection, atol=1e-6), name


@pytest.mark.parametrize(
    ("projections", "message"),
    [
        (["laion"], "model.projections = 'laion': expected image:NAME with a part of the path of a source"),
        (["text:replayed"], "expected image:NAME with a part of the path of a source"),
        (["image:"], "expected image:NAME with a part of the path of a source"),
        (["image:laion"], "model.projections = 'image:laion': 0 sources of data.train contain 'laion'"),
        (["image:/"], "model.projections = 'image:/': 2 sources of data.train contain '/': expected one"),
        (["image:replayed", "image:pairs"], "and at least one without a projection of its own"),
        (["image:replayed", "image:playe"], "expected a source of data.train for each"),
    ],
)
def test_sources_that_are_not_found_are_errors(
    projections: list[str], message: str, both: str, trainings: Trainings, tmp_path: Path
) -> None:
    settings = (f"data.train={both}", f"model.projections={json.dumps(projections)}")
    assert message in error_of(trainings.run(tmp_path / "run", *settings, status=1))


def test_towers_without_projections_of_their_own_are_refused(
    both: str, trainings: Trainings, tmp_path: Path
) -> None:
    settings = (f"data.train={both}", 'model.projections=["image:replayed"]')
    error = error_of(trainings.run(tmp_path / "run", *settings, "model.name=open_clip:RN50", status=1))
    assert "model.projections" in error and "clipkit's ViT" in error, error
    views = ("views.weight=1", "optim.average=0.9")
    error = error_of(trainings.run(tmp_path / "run", *settings, *views, status=1))
    assert "model.projections" in error and "views.weight" in error, error
