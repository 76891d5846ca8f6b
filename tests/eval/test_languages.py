"""Tests of scores per language and their means against direct computations, and of damaged files."""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.model import eval_pixels
from eval import Encoder, EvalDataset, open_dataset, read_results
from eval.datasets.card import parse_card
from eval.datasets.targets import find_targets, select_languages
from eval.features.encoder import ImageFeatures
from eval.run import Results, run_model
from tests.eval.conftest import CLASSES, png

WriteDataset = Callable[..., Path]
IMAGES = 12


def write_images(folder: Path, names: list[str]) -> list[bytes]:
    folder.mkdir(parents=True)
    contents = [png(number) for number in range(len(names))]
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_bytes(content)
    return contents


@pytest.fixture
def xm(tmp_path: Path) -> Path:
    """A folder in the layout of Crossmodal-3600, with two German captions and one Thai caption per image."""
    folder = tmp_path / "root" / "xm"
    keys = [f"{number:016x}" for number in range(IMAGES)]
    write_images(folder / "images", [f"{key}.jpg" for key in keys])
    lines = [
        {
            "image/key": key,
            "image/locale": "de",
            "de": {"caption": [f"Bild {i}", f"das Bild {i}"], "caption/tokenized": ["…"]},
            "th": {"caption": [f"ภาพ {i}"]},
        }
        for i, key in enumerate(keys)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / "captions.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def xtd(tmp_path: Path) -> Path:
    folder = tmp_path / "xtd"
    names = [f"COCO_val2014_{number}.jpg" for number in range(IMAGES)]
    write_images(folder / "images", names)
    for part, language in (("XTD10", "it"), ("MIC", "de"), ("STAIR", "jp")):
        (folder / part).mkdir()
        text = "\n".join(f"{language} {number}" for number in range(IMAGES))
        (folder / part / f"test_1kcaptions_{language}.txt").write_text(text + "\n")
    (folder / "XTD10" / "test_image_names.txt").write_text("\n".join(names) + "\n")
    (folder / "XTD10" / "README.txt").write_text("not captions\n")
    return folder


def scored(model: CLIP, target: object, out: Path, *tasks: str, skip: bool = False) -> Results:
    found = Results()
    run_model(model, [target], out=out, tasks=tasks, skip_existing=skip, results=found)  # type: ignore[list-item]
    return found


def features(model: CLIP, contents: list[bytes], texts: list[str]) -> torch.Tensor:
    """Return cosine similarities, images × texts, by the model's own methods."""
    pixels = torch.stack(
        [eval_pixels(Image.open(BytesIO(content)), model.preprocess) for content in contents]
    )
    with torch.no_grad():
        images = model.encode_image(pixels, normalize=True)
        return images @ model.encode_text(model.tokenizer(texts), normalize=True).T


def test_retrieval_scores_per_language_and_mean(model: CLIP, xm: Path, tmp_path: Path) -> None:
    (target,) = find_targets([str(xm)])
    found = scored(model, target, tmp_path / "r.jsonl")
    values = {(one.setting, one.metric): one for one in found.scores}
    assert not found.errors and {setting for setting, _ in values} == {"de", "th", "mean of de, th"}

    contents = [png(number) for number in range(IMAGES)]
    own = torch.arange(IMAGES)
    for language, texts, owner in (
        ("de", [t for i in range(IMAGES) for t in (f"Bild {i}", f"das Bild {i}")], own.repeat_interleave(2)),
        ("th", [f"ภาพ {i}" for i in range(IMAGES)], own),
    ):
        similarities = features(model, contents, texts)
        for k in (1, 5, 10):
            by_image = owner[similarities.topk(k).indices] == own[:, None]
            by_text = similarities.T.topk(k).indices == owner[:, None]
            for way, hits in (("image_to_text", by_image), ("text_to_image", by_text)):
                expected = hits.any(dim=1).float().mean().item()
                assert values[language, f"{way}_R@{k}"].value == pytest.approx(expected, abs=1e-6)
    mean = values["mean of de, th", "mean_R@1"]
    assert mean.value == pytest.approx((values["de", "mean_R@1"].value + values["th", "mean_R@1"].value) / 2)
    assert mean.low is None

    lines = read_results(tmp_path / "r.jsonl")
    assert {line["language"] for line in lines} == {"de", "th", "de,th"}
    assert len({line["captions"] for line in lines if line["setting"] in ("de", "th")}) == 2
    again = scored(model, target, tmp_path / "r.jsonl", skip=True)
    assert again.existing == len(lines) and not again.scores
    one = scored(model, select_languages(target, ["th"]), tmp_path / "one.jsonl", skip=True)
    assert {score.setting for score in one.scores} == {"th"}


def test_images_are_encoded_once(
    model: CLIP, xtd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    encode = Encoder.images

    def counted(encoder: Encoder, dataset: EvalDataset) -> ImageFeatures:
        calls.append(dataset)
        return encode(encoder, dataset)

    monkeypatch.setattr(Encoder, "images", counted)
    (target,) = find_targets([str(xtd)])
    found = scored(model, target, tmp_path / "r.jsonl")
    assert {score.setting for score in found.scores} == {"de", "jp", "it", "mean of de, jp, it"}
    assert len(calls) == 1


def test_class_names_per_language_equal_separate_datasets(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    folder = write_dataset("colours")
    names = {"de": [f"{one} auf Deutsch" for one in CLASSES], "fr": [f"{one} en français" for one in CLASSES]}
    (folder / "names.json").write_text(json.dumps(names))
    (target,) = find_targets([str(folder)])
    plain = scored(model, target, tmp_path / "plain.jsonl").scores
    assert {one.setting for one in plain} == {""}
    both = scored(model, select_languages(target, ["all"]), tmp_path / "r.jsonl").scores
    for language, own in names.items():
        (folder / "classnames.txt").write_text("\n".join(own) + "\n")
        expected = scored(model, find_targets([str(folder)])[0], tmp_path / f"{language}.jsonl").scores
        assert {one.metric: one.value for one in expected} == {
            item.metric: item.value for item in both if item.setting == language
        }
    with pytest.raises(DataError, match="no language 'xx'"):
        select_languages(target, ["xx"])


def test_babel_imagenet_scores_named_classes(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classes are in another order than in the card, and the language has names for three of them."""
    order = list(reversed(CLASSES))
    labels = tuple(i % 7 for i in range(23))
    folder = write_dataset("imagenet1k", labels=labels, class_names=order)
    keys = json.dumps(list(CLASSES))
    metric = 'tasks = ["zero-shot"]\nmetric = "acc1"\n'
    images = parse_card(f"{metric}keys = {keys}\n", name="imagenet1k", file="a")
    babel = parse_card(
        f'{metric}keys = {keys}\n[sources]\nimages = "imagenet1k"\n', name="babel_imagenet", file="b"
    )
    monkeypatch.setattr(
        "eval.datasets.targets.load_card", {"imagenet1k": images, "babel_imagenet": babel}.__getitem__
    )
    numbers = [5, 0, 3]
    names = ["weiß", "rot", "gelb"]
    (tmp_path / "babel_imagenet").mkdir()
    (tmp_path / "babel_imagenet" / "babel_imagenet.json").write_text(json.dumps({"DE": [numbers, names]}))
    (tmp_path / "babel_imagenet" / "nllb_dist13b_prompts.json").write_text(json.dumps({"DE": ["ein {}."]}))
    (target,) = find_targets(["babel_imagenet"], root=tmp_path)
    found = scored(model, target, tmp_path / "r.jsonl")
    accuracy = next(score for score in found.scores if score.metric == "acc1")

    opened = open_dataset(folder)
    number_of = [CLASSES.index(order[label]) for label in labels]  # class numbers of the card
    kept = [i for i, number in enumerate(number_of) if number in numbers]
    similarities = features(model, [opened.images.read(i) for i in kept], [f"ein {name}." for name in names])
    right = [numbers[int(row.argmax())] == number_of[i] for row, i in zip(similarities, kept, strict=True)]
    assert (accuracy.setting, accuracy.n) == ("de", len(kept)) and 0 < len(kept) < 23
    assert accuracy.value == pytest.approx(sum(right) / len(right))


def test_damaged_files_are_rejected(xm: Path, xtd: Path) -> None:
    with (xtd / "MIC" / "test_1kcaptions_de.txt").open("a") as file:
        file.write("one more\n")
    with pytest.raises(DataError, match=r"13 lines, test_image_names.txt has 12"):
        open_dataset(xtd)
    lines = (xm / "captions.jsonl").read_text().splitlines()
    for damaged, message in (
        (json.loads(lines[3]) | {"de": {"caption": []}}, "no caption in language de"),
        (json.loads(lines[3]) | {"xx": {"caption": ["a"]}}, "line 4 differs .* language xx"),
        (json.loads(lines[3]) | {"de": {"caption": 3}}, "line 4: expected image/key"),
        (json.loads(lines[3]) | {"image/key": "gone"}, "gone.jpg: No such file"),
    ):
        text = "\n".join([*lines[:3], json.dumps(damaged), *lines[4:]])
        (xm / "captions.jsonl").write_text(text)
        with pytest.raises(DataError, match=message):
            open_dataset(xm)
