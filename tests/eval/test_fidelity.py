"""Tests of scores against CLIP_benchmark's, with the same weights and the same files.

CLIP_benchmark's command reads the same folders with an open_clip model of the same weights; only its model
loader is replaced. eval/README.md lists the definitions that differ. The test_metrics files compare the
metrics alone, on random features.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import Tensor

import clipkit
from clipkit import CLIP
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from data.options import PackOptions
from data.pack import pack
from eval import Encoder, Subject, evaluate, open_dataset
from eval.tasks import TASKS, Options
from tests.eval.conftest import CLASSES

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of CLIP_benchmark

SIDE = 32
CLOSE = 1e-4
TEMPLATES = "a photo of a {c}.\n{c}\na blurry image with much {c} in it\n"


def image_file(number: int) -> bytes:
    """Return an encoded image of four coloured squares with noise; format and size depend on the number."""
    random = np.random.default_rng(number)
    squares = random.integers(0, 256, (2, 2, 3)).repeat(20 + number % 9, axis=0).repeat(24, axis=1)
    noisy = np.clip(squares + random.integers(-30, 31, squares.shape), 0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(noisy).save(file, *(("jpeg",) if number % 2 else ("png",)))
    return file.getvalue()


def publish(root: Path, samples: Sequence[Mapping[str, Any]], kind: str = "", split: str = "test") -> Path:
    """Write a folder in the published layout; other splits have other images."""
    (root / split).mkdir(parents=True)
    first = 0 if split == "test" else 1000
    with webdataset.ShardWriter(str(root / split / "%d.tar"), maxcount=9, verbose=False) as sink:
        for number, sample in enumerate(samples):
            extension = "jpg" if number % 2 else "png"
            sink.write({"__key__": f"s{number:07d}", extension: image_file(first + number), **sample})
        shards = sink.shard
    (root / split / "nshards.txt").write_text(f"{shards}\n")
    (root / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    (root / "zeroshot_classification_templates.txt").write_text(TEMPLATES)
    if kind:
        (root / "dataset_type.txt").write_text(f"{kind}\n")
    return root


class Twins:
    """A clipkit and an open_clip model with the same weights, which are scaled so that predictions vary."""

    def __init__(self, seed: int) -> None:
        self.cli = pytest.importorskip("clip_benchmark.cli")  # imported here because it takes seconds
        open_clip = pytest.importorskip("open_clip")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.theirs = open_clip.CLIP(
                embed_dim=24,
                vision_cfg={"image_size": SIDE, "patch_size": 8, "width": 48, "layers": 2, "head_width": 12},
                text_cfg={"width": 32, "layers": 2, "heads": 2},
            ).eval()
        with torch.no_grad():
            for name, parameter in self.theirs.named_parameters():
                if name != "logit_scale" and parameter.ndim > 1:
                    parameter.mul_(4)
        self.ours = CLIP(
            Architecture(
                embed_dim=24,
                vision=VisionTower(image_size=SIDE, patch_size=8, width=48, layers=2, heads=4),
                text=TextTower(width=32, layers=2, heads=2),
            )
        ).eval()
        self.ours.load_state_dict(self.theirs.state_dict())
        self.transform = open_clip.image_transform(
            SIDE, is_train=False, mean=open_clip.OPENAI_DATASET_MEAN, std=open_clip.OPENAI_DATASET_STD
        )
        self.tokenizer = open_clip.get_tokenizer("ViT-B-32")

    def scores(self, folder: Path, task: str) -> dict[str, float]:
        """Return clipkit's scores."""
        return {one.metric: one.value for one in evaluate(self.ours, folder, tasks=[task])}

    def theirs_says(self, folder: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
        """Return the scores of CLIP_benchmark's command, in full precision and small batches."""
        out = folder / "theirs.json"
        arguments = ["--dataset", "wds/made_up", "--dataset_root", folder, "--task", task, "--output", out]
        plain = ["--no_amp", "--num_workers", 0, "--batch_size", 8, "--quiet", "--recall_k", 1, 5, 10]
        monkeypatch.setattr(self.cli, "load_clip", lambda **_: (self.theirs, self.transform, self.tokenizer))
        monkeypatch.setattr(sys, "argv", ["clip_benchmark", "eval", *map(str, arguments + plain)])
        # CLIP_benchmark calls float() on arrays of one element, which NumPy 2.4 rejects
        monkeypatch.setattr(self.cli.zeroshot_classification, "float", lambda one: one.item(), raising=False)
        with torch.random.fork_rng(devices=[]):
            self.cli.main()
        found: dict[str, float] = json.loads(out.read_text())["metrics"]
        return found


@pytest.fixture(scope="module")
def twins() -> Twins:
    return Twins(seed=0)


def test_zero_shot_equals_clip_benchmark(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = [i * i % 6 for i in range(70)]  # unequal classes; the last has no images
    folder = publish(tmp_path / "set", [{"cls": label} for label in labels])
    ours = twins.scores(folder, "zero-shot")
    assert ours == pytest.approx(twins.theirs_says(folder, "zeroshot_classification", monkeypatch), abs=CLOSE)
    assert set(ours) == {"acc1", "acc5", "mean_per_class_recall"}
    subject = Subject(Encoder(twins.ours), open_dataset(folder))
    predicted = (subject.images().projected @ subject.class_weights()).argmax(dim=1)
    assert len(predicted.unique()) > 2 and 0 < ours["acc1"] < ours["acc5"] < 1  # the scores are not trivial


def test_multi_label_map_equals_clip_benchmark(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(5)
    rows = (random.random((50, len(CLASSES))) < 0.3).astype(np.int64)
    rows[0] = 1  # CLIP_benchmark counts a class without images as 0; clipkit ignores it
    folder = publish(tmp_path / "set", [{"npy": row} for row in rows], "multilabel")
    ours = twins.scores(folder, "zero-shot")
    theirs = twins.theirs_says(folder, "zeroshot_classification", monkeypatch)
    assert ours["mean_average_precision"] == pytest.approx(theirs["mean_average_precision"], abs=CLOSE)
    assert abs(ours["map_11_point"] - theirs["mean_average_precision"]) > CLOSE  # a different definition


def test_findings_with_positive_and_negative_prompts_equal_softmax_of_each_pair(
    twins: Twins, tmp_path: Path
) -> None:
    """CheXzero's protocol, computed by hand: the softmax over "X" and "no X" ranks the images of a finding."""
    rows = (np.random.default_rng(5).random((50, len(CLASSES))) < 0.3).astype(np.int64)
    folder = publish(tmp_path / "set", [{"npy": row} for row in rows], "multilabel")
    dataset = replace(open_dataset(folder), templates=("{c}",), negative_templates=("no {c}", "without {c}"))
    subject = Subject(Encoder(twins.ours), dataset, metrics=("roc_auc_macro", "mean_average_precision"))
    outcome = TASKS["zero-shot"].run(subject, Options(details=True))
    scores = {score.metric: score for score in outcome.scores}
    assert list(scores) == ["roc_auc_macro", "mean_average_precision"]

    images = subject.images().projected
    names = dataset.class_names
    positive = clipkit.encode_text(names, twins.ours)
    denying = [
        clipkit.encode_text([f"{word} {name}" for name in names], twins.ours) for word in ("no", "without")
    ]
    negative = torch.nn.functional.normalize(torch.stack(denying).mean(dim=0), dim=1)
    logits = torch.stack([images @ positive.T, images @ negative.T]).double()  # (2, N, C)
    probabilities = logits.softmax(dim=0)[0]
    area = scores["roc_auc_macro"]
    assert area.value == pytest.approx(roc_auc_score(rows, probabilities, average="macro"), abs=1e-3)
    assert area.low is not None and area.low < area.value and area.chance == 0.5
    plain = roc_auc_score(rows, images @ positive.T, average="macro")
    assert abs(area.value - plain) > 0.01  # the negative prompts matter
    (details,) = outcome.details
    assert details.values["roc_auc_macro"].n == rows.size


def test_retrieval_recall_equals_clip_benchmark(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["red", "green", "old", "wet", "tall", "sad", "dog", "boat", "tree", "cup"]
    own = [[f"{a} {words[i % 10]} {i}" for a in words[: 1 + i % 4]] for i in range(40)]  # 1 to 4 per image
    folder = publish(tmp_path / "set", [{"txt": "\n".join(texts)} for texts in own], "retrieval")
    ours, theirs = (
        twins.scores(folder, "retrieval"),
        twins.theirs_says(folder, "zeroshot_retrieval", monkeypatch),
    )
    for there, here in (
        ("image_retrieval_recall@", "text_to_image_R@"),
        ("text_retrieval_recall@", "image_to_text_R@"),
    ):
        assert {k: ours[f"{here}{k}"] for k in (1, 5, 10)} == pytest.approx(
            {k: theirs[f"{there}{k}"] for k in (1, 5, 10)}, abs=CLOSE
        )
        assert 0 < ours[f"{here}10"] < 1


@pytest.mark.parametrize(
    ("name", "folder"), [("captions.txt", "Images"), ("Flickr8k.token.txt", "Flicker8k_Dataset")]
)
def test_recall_of_flickr8k_equals_clip_benchmark(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    """Its two usual tables with five rows per image are scored as they are, and packed."""
    words = ["red", "green", "old", "wet", "tall", "sad", "dog", "boat", "tree", "cup"]
    captions = [[f"{words[(i + n) % 10]} {words[i % 7]}, {i} {n}" for n in range(5)] for i in range(60)]
    published = publish(tmp_path / "set", [{"txt": "\n".join(texts)} for texts in captions], "retrieval")
    (tmp_path / folder).mkdir()
    lines = ["image,caption"] if name == "captions.txt" else []
    for i, texts in enumerate(captions):
        file = f"{i}_{'jpg' if i % 2 else 'png'}.{'jpg' if i % 2 else 'png'}"
        (tmp_path / folder / file).write_bytes(image_file(i))
        for n, text in enumerate(texts):
            lines.append(f'{file},"{text}"' if name == "captions.txt" else f"{file}#{n}\t{text}")
    table = tmp_path / name
    table.write_text("\n".join(lines) + "\n")
    packed = pack(table, tmp_path / "packed", PackOptions(test=1), progress=False)
    assert packed.summary == "300 rows, 60 images with 5 captions each"
    theirs = twins.theirs_says(published, "zeroshot_retrieval", monkeypatch)
    for source in (table, tmp_path / "packed"):
        ours = twins.scores(source, "retrieval")
        for k in (1, 5, 10):
            assert ours[f"text_to_image_R@{k}"] == pytest.approx(
                theirs[f"image_retrieval_recall@{k}"], abs=CLOSE
            )
            assert ours[f"image_to_text_R@{k}"] == pytest.approx(
                theirs[f"text_retrieval_recall@{k}"], abs=CLOSE
            )
        assert 0 < ours["text_to_image_R@10"] < 1


@pytest.mark.parametrize("per_item", [1, 2])
def test_caption_choice_equals_clip_benchmark(twins: Twins, tmp_path: Path, per_item: int) -> None:
    """With one image per item as in SugarCrepe, and with two, one for each caption, as in Winoground."""
    pairs = [(f"a {i} above a {i + 1}", f"a {i + 1} above a {i}") for i in range(30)]
    choices = [pair[:: 1 - 2 * j] for pair in pairs for j in range(per_item)]
    samples = [{"txt": "\n".join(own)} for own in choices]
    folder = publish(tmp_path / "set", samples, "image_caption_selection")
    dataset = open_dataset(folder)
    if per_item == 2:
        dataset = replace(dataset, items=torch.arange(len(pairs)).repeat_interleave(2))
    ours = {one.metric: one.value for one in evaluate(twins.ours, dataset)}
    seen = torch.stack([twins.transform(opened(dataset.images.read(i))) for i in range(len(dataset))])
    batches = [(seen.unflatten(0, (-1, per_item)), [list(pair) for pair in pairs])]
    theirs = twins.cli.image_caption_selection.evaluate(
        twins.theirs, batches, twins.tokenizer, "cpu", amp=False
    )
    if per_item == 1:
        assert ours["accuracy"] == pytest.approx(theirs["text_acc"], abs=CLOSE) and 0 < ours["accuracy"] < 1
    else:
        same = {"text": "text_acc", "image": "image_acc", "group": "acc"}
        assert ours == pytest.approx({here: theirs[there] for here, there in same.items()}, abs=CLOSE)
        assert 0 < ours["text"] < 1


def opened(image: bytes) -> Image.Image:
    return Image.open(BytesIO(image))


class Processor(str):
    """A name of the CPU that equals "cuda", the only device that CLIP_benchmark's linear probe accepts."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other in ("cuda", "cpu")

    __hash__ = str.__hash__


def test_linear_probe_features_equal_clip_benchmark(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only features are compared: CLIP_benchmark trains with AdamW, on projected unit-norm features."""
    probe = twins.cli.linear_probe
    folder = tmp_path / "set"
    for split, count in (("train", 42), ("test", 21)):
        publish(folder, [{"cls": i % 7} for i in range(count)], split=split)
    splits = [
        twins.cli.build_dataset("wds/x", str(folder), twins.transform, split).batched(8)
        for split in ("train", "test")
    ]
    loaders = [webdataset.WebLoader(split, batch_size=None) for split in splits]
    monkeypatch.setattr(twins.cli.zeroshot_classification, "float", lambda one: one.item(), raising=False)
    for kind in (torch.nn.Module, Tensor):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    root, device = str(tmp_path / "kept"), Processor("cpu")
    with torch.random.fork_rng(devices=[]):
        found = probe.evaluate(twins.theirs, *loaders, -1, 8, 0, 0.1, 1, "id", 0, root, device, amp=False)
    assert (found["normalized"], found["weight_decay"]) == (True, 0)
    test = open_dataset(folder)
    subject = Subject(Encoder(twins.ours), test, open_split=lambda split: open_dataset(folder, split=split))
    for split in ("train", "test"):
        kept, labels = (
            torch.load(tmp_path / "kept" / "id" / f"{what}_{split}.pt", weights_only=True)
            for what in ("features", "targets")
        )
        images, own = subject.images(split), subject.split(split)
        torch.testing.assert_close(images.projected, kept, atol=CLOSE, rtol=0)
        assert own is not None and own.labels is not None and own.labels.tolist() == labels.tolist()
        assert images.before_projection.shape == (len(kept), 48)  # the features that clipkit's probe uses
