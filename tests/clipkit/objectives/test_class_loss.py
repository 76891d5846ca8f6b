"""Tests of class heads: class names, loss, teacher, weights, and rejected settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

import clipkit
from clipkit.__main__ import dispatch
from clipkit.config import Config, DistillConfig, LossConfig, ModelConfig, SmallConfig, load_config
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.formats.checkpoint import parse_architecture, save_model, serialize_architecture
from clipkit.model.architectures import ARCHITECTURES, ClassTable
from clipkit.model.clip import CLIP, create
from clipkit.model.names import create_architecture
from clipkit.objectives import Outputs, Targets
from clipkit.objectives.classes import Classes
from clipkit.objectives.distill import Teaching
from clipkit.training.build import first_model, shape_of
from clipkit.training.parallel import recompute_blocks

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 2**31), st.floats(0.1, 100))
def test_class_loss_is_cross_entropy_and_accuracy_is_argmax(
    rows: int, classes: int, seed: int, scale: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    images, heads = (
        F.normalize(torch.randn(n, 5, dtype=torch.float64, generator=random), dim=1) for n in (rows, classes)
    )
    labels = torch.randint(0, classes, (rows,), generator=random)
    logits = scale * images @ heads.T
    outputs = Outputs(images, heads, torch.tensor(scale))
    targets = Targets(identities=labels[:, None], tokens=labels[:, None], same="negatives")
    value = Classes().loss(outputs, targets)
    assert value.item() == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    assert Classes().figures(images, heads, targets) == {"acc1": accuracy}


@given(
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(0, 2**31),
    st.floats(0.1, 50),
    st.sampled_from([0.5, 1.0, 4.0]),
)
def test_class_divergence_equals_plain_formula(
    rows: int, classes: int, seed: int, scale: float, temperature: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    images, heads, taught, taught_heads = (
        F.normalize(torch.randn(n, size, dtype=torch.float64, generator=random), dim=1)
        for n, size in ((rows, 5), (classes, 5), (rows, 3), (classes, 3))
    )
    teaching = Teaching(images=taught, texts=taught_heads, scale=torch.tensor(20.0))
    factor = torch.tensor(scale, dtype=torch.float64)
    own, other = scale * images @ heads.T, 20 * taught @ taught_heads.T

    def value(**settings: Any) -> float:
        distill = DistillConfig(teacher="any", **settings)
        return Classes().divergence(Outputs(images, heads, factor), teaching, distill).item()

    p, q = (own / temperature).softmax(1), (other / temperature).softmax(1)
    divergence = temperature**2 * (q * (q.log() - p.log())).sum(1).mean().item()
    assert value(temperature=temperature) == pytest.approx(divergence, rel=1e-6, abs=1e-10)
    assert value(hard=True) == pytest.approx(F.cross_entropy(own, other.argmax(1)).item(), rel=1e-6)


@pytest.fixture(scope="module")
def head() -> CLIP:
    names = ("tabby cat", "dog", "3")
    return create(replace(ARCHITECTURES["ViT-Ti-4-16"], text=ClassTable(names=names)), seed=0).eval()


def test_class_is_encoded_by_its_name(head: CLIP, tmp_path: Path) -> None:
    rows = clipkit.encode_text([" tabby\tcat ", "3"], head)
    assert head.text is not None
    weight = head.text.get_parameter("weight").detach()
    assert torch.equal(torch.as_tensor(rows), F.normalize(weight[[0, 2]], dim=1))
    with pytest.raises(DataError, match="'cat' is not one of the model's 3 classes: "):
        clipkit.encode_text(["cat"], head)
    save_model(head, tmp_path / "head")
    stored = clipkit.load(tmp_path / "head")
    assert stored.architecture == head.architecture
    assert torch.equal(
        torch.as_tensor(clipkit.encode_text([" tabby cat", "3"], stored)), torch.as_tensor(rows)
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "number of classes = 0"),
        (("a", "b", "a"), "class name 'a' occurs twice"),
        (("a", ""), "class name '' is empty"),
        (("a  b",), "class name 'a  b' is empty or has"),
        (("a", 3), "names is not a list"),
        ("ab", "names is not a list"),
    ],
)
def test_invalid_class_names_are_rejected(names: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClassTable(names=names)  # type: ignore[arg-type]
    stored = serialize_architecture(replace(ARCHITECTURES["ViT-Ti-4-16"], text=ClassTable(names=("a",))))
    stored["text"]["names"] = names
    with pytest.raises(CheckpointError, match=said):
        parse_architecture(stored)


def test_architecture_reads_class_names_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "classnames.txt"
    file.write_text("cat\ndog\n")
    found = create_architecture("ViT-Ti-4-16", text=f"classes:{file}")
    assert found.text == ClassTable(names=("cat", "dog")) and found.text.context_length == 1
    with pytest.raises(ConfigError, match="a class is one token"):
        create_architecture("ViT-Ti-4-16", text=f"classes:{file}", context_length=20)
    with pytest.raises(ConfigError, match="cannot read class names from"):
        create_architecture("ViT-Ti-4-16", text="classes:nothing")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["loss.name=classes"], "loss.name = 'classes' is invalid: requires model.text=classes:FILE"),
        (["model.text=classes:x"], "model.text = 'classes:x' is invalid: requires loss.name=classes"),
        (["loss.name=classes", "model.text=classes:x", "loss.same=positives"], "loss.same = 'positives'"),
        (
            ["loss.name=classes", "model.text=classes:x", "distill.features=y", "distill.text_features=z"],
            "cannot be combined with loss.name=classes; use distill.teacher",
        ),
        (["distill.teacher=y", "distill.hard=true"], "no effect unless loss.name=classes"),
        (["distill.teacher=y", "distill.temperature=2"], "no effect unless loss.name=classes"),
        (["loss.name=classes", "model.text=classes:x", "distill.hard=true"], "unless distill.teacher"),
    ],
)
def test_class_head_and_loss_require_each_other(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(QUICKSTART, settings)
    assert Config().loss.name == "clip"


def test_encode_accepts_only_class_names(head: CLIP, tmp_path: Path) -> None:
    save_model(head, tmp_path / "head")
    command = ["encode", str(tmp_path / "texts.txt"), "--text", "--model", str(tmp_path / "head"), "--out"]
    (tmp_path / "texts.txt").write_text("3\nfox")
    with pytest.raises(DataError, match="'fox' is not one of the model's 3 classes"):
        dispatch([*command, str(tmp_path / "b")])
    (tmp_path / "texts.txt").write_text("3\ndog")
    assert dispatch([*command, str(tmp_path / "a")]) == 0
    rows = torch.from_numpy(np.load(tmp_path / "a/text_emb/text_emb_0.npy")).float()
    assert (rows - torch.as_tensor(clipkit.encode_text(["3", "dog"], head))).abs().max() < 1e-3


def test_image_tower_with_class_head_is_recomputed(head: CLIP) -> None:
    recompute_blocks(head)
    assert all(block.recompute for block in head.transformers["image"].blocks)
    recompute_blocks(head, every=0)
    assert not any(block.recompute for block in head.transformers["image"].blocks)


BY_CLASSES, TINY = LossConfig(name="classes"), "ViT-Ti-4-16"


def begin(weights: Path, text: str, *, loss: str = "classes", checkpoint: Path | None = None) -> CLIP:
    """Return the model that a training starts or resumes with."""
    model = ModelConfig(name=TINY, weights=str(weights), text=text)
    shape = shape_of(model, LossConfig(name=loss), SmallConfig())
    return first_model(Config(model=model, loss=LossConfig(name=loss)), shape, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("dog", "tabby cat", "3"), "classes in another order, number 1 is 'tabby cat' and not 'dog'"),
        (("tabby cat", "fox", "3"), "other classes, number 2 is 'dog' and not 'fox'"),
        (("tabby cat", "dog", "3", "x"), "3 classes, not of 4"),
    ],
)
def test_class_names_that_differ_from_the_weights_are_rejected(
    head: CLIP, tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    save_model(head, tmp_path / "head")
    file = tmp_path / "classnames.txt"
    file.write_text("\n".join(names))
    with pytest.raises(ConfigError, match=f"head' are of {said}: set classes:.* as it was for them"):
        begin(tmp_path / "head", f"classes:{file}")
    with pytest.raises(CheckpointError, match=f"head is of {said}: set .*, or out=… for a new run"):
        begin(tmp_path / "head", f"classes:{file}", checkpoint=tmp_path / "head")
    file.write_text("\n".join(("tabby cat", "dog", "3")))
    assert begin(tmp_path / "head", f"classes:{file}").name == f"{TINY} + classes"  # not a folder name


def test_new_head_keeps_the_image_tower_at_another_size(head: CLIP, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a\nb")
    clip = create(ARCHITECTURES[TINY], name=TINY, seed=1)
    for name, one in (("head", head), ("clip", clip)):
        save_model(one, tmp_path / name)
        model = ModelConfig(
            name=TINY,
            weights=str(tmp_path / name),
            text=f"classes:{tmp_path}/names",
            image_size=32,
            new_head=True,
        )
        shape = shape_of(model, BY_CLASSES, SmallConfig())
        first = first_model(Config(model=model, loss=BY_CLASSES), shape)
        kept, resized = one.visual.state_dict(), clipkit.load(tmp_path / name, image_size=32)
        for key, value in first.visual.state_dict().items():
            wanted = resized.visual.state_dict() if key == "positional_embedding" else kept
            assert torch.equal(value, wanted[key]), key
        assert first.tokenizer(["b"]).tolist() == [[1]] and first.architecture.vision.image_size == 32
        assert first.preprocess.image_size == 32 and torch.equal(first.colors[0], one.colors[0])
    other = ModelConfig(name="ViT-Ti-8-48", weights=str(tmp_path / "clip"), new_head=True)
    with pytest.raises(
        ConfigError, match="clip' are of ViT-Ti-4-16, whose image tower is not that of ViT-Ti-8"
    ):
        first_model(Config(model=other), shape_of(other, LossConfig(), SmallConfig()))


def test_weights_with_another_kind_of_head_are_rejected(head: CLIP, tmp_path: Path) -> None:
    save_model(head, tmp_path / "head")
    save_model(create(ARCHITECTURES[TINY], name=TINY, seed=0), tmp_path / "clip")
    (tmp_path / "names").write_text("a\nb")
    with pytest.raises(
        ConfigError, match=r"have a text tower instead of the class head .* eval fine-tune` makes"
    ):
        begin(tmp_path / "clip", f"classes:{tmp_path}/names")
    with pytest.raises(
        ConfigError, match=r"have a class head instead of the text tower .* set other weights"
    ):
        begin(tmp_path / "head", "", loss="clip")


def test_small_data_of_weights_may_differ_from_the_named_architecture(tmp_path: Path) -> None:
    drawn = ARCHITECTURES[TINY].small_data
    save_model(
        create(replace(ARCHITECTURES[TINY], small_data=not drawn), name="", seed=0), tmp_path / "model"
    )
    assert begin(tmp_path / "model", "", loss="clip").architecture.small_data != drawn
    begin(tmp_path / "model", "", loss="clip", checkpoint=tmp_path / "model")


def test_class_head_supports_small_images_but_no_context_length(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a\nb")
    model = ModelConfig(name=TINY, text=f"classes:{tmp_path}/names")
    shape_of(model, BY_CLASSES, SmallConfig(steps=3, image_size=8))
    with pytest.raises(ConfigError, match=r"small.context_length = 5 does not fit .*: a class is one token"):
        shape_of(model, BY_CLASSES, SmallConfig(steps=3, context_length=5))
