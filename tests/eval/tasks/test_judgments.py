"""Tests of the task judgments: Kendall's tau as scipy computes it, in the file layout of Flickr8k."""

import csv
import json
import math
import random
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from clipkit import CLIP
from clipkit.errors import DataError, Unavailable
from clipkit.formats import save_model
from eval import Encoder, Subject, evaluate
from eval.__main__ import main
from eval.metrics import METRICS, Judgments
from eval.readers import open_dataset
from eval.run import select_tasks
from tests.eval.conftest import WriteDataset, png

stats = pytest.importorskip("scipy.stats")
TAUS = ("kendall_tau_b", "kendall_tau_c")
Layout = dict[str, list[str]]


def write_layout(folder: Path, images: int, *, tokens: bool = False) -> Layout:
    """Write images, captions and random judgments in the layout of Flickr8k; return the captions of each image."""
    (folder / "images").mkdir(parents=True)
    names = [f"{i}_a.jpg" for i in range(images)]
    captions = {name: [f'A "dog" number {i}, and {k} cats' for k in range(2)] for i, name in enumerate(names)}
    if tokens:
        rows = [f"{name}#{k}\t{text}\n" for name, texts in captions.items() for k, text in enumerate(texts)]
        (folder / "Flickr8k.token.txt").write_text("".join(reversed(rows)))
    else:
        with (folder / "captions.txt").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows(
                [("image", "caption"), *((name, text) for name in names for text in captions[name])]
            )
    chosen = random.Random(images)
    expert, crowd = [], []
    for i, name in enumerate(names):
        (folder / "images" / name).write_bytes(png(i))
        for other in (name, names[i - 1], names[i - 2]):
            pair = f"{name}\t{other}#{chosen.randrange(2)}"
            expert.append("\t".join([pair, *(str(chosen.randint(1, 4)) for _ in range(3))]))
            yes = chosen.randint(0, 3)
            crowd.append(f"{pair}\t{yes / 3:.15g}\t{yes}\t{3 - yes}")
    (folder / "ExpertAnnotations.txt").write_text("\n".join(expert) + "\n")
    (folder / "CrowdFlowerAnnotations.txt").write_text("\n".join(crowd) + "\n")
    return captions


def list_judged(folder: Path, captions: Layout, file: str) -> list[tuple[str, str, float]]:
    """Return image, caption and rating of each judgment, read independently."""
    rows = []
    for line in (folder / file).read_text().splitlines():
        image, caption, *cells = line.split("\t")
        other, k = caption.split("#")
        if file.startswith("Crowd"):
            rows.append((image, captions[other][int(k)], float(cells[0])))
        elif other != image:
            rows += [(image, captions[other][int(k)], float(cell)) for cell in cells]
    return rows


def remove_mean(model: CLIP, texts: list[str]) -> CLIP:
    """Return the model without the mean direction of the features of texts, so that cosines have both signs."""
    model = deepcopy(model)
    mean = Encoder(model).texts(texts).mean(dim=0)
    projection = model.text_projection
    assert isinstance(projection, torch.nn.Parameter)
    projection.data -= projection.data @ torch.outer(mean, mean) / (mean @ mean)
    return model


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("file", ["ExpertAnnotations.txt", "CrowdFlowerAnnotations.txt"])
def test_correlations_equal_scipy(tmp_path: Path, model: CLIP, file: str, tokens: bool) -> None:
    captions = write_layout(tmp_path / "set", 12, tokens=tokens)
    encoder = Encoder(remove_mean(model, [text for texts in captions.values() for text in texts]))
    dataset = open_dataset(tmp_path / "set" / file)
    assert dataset.name == f"flickr8k-{file.removesuffix('Annotations.txt')}"
    subject = Subject(encoder, dataset)
    scores = {score.metric: score for score in evaluate(subject)}
    rows = list_judged(tmp_path / "set", captions, file)
    images = subject.images().projected
    index = {dataset.images.samples.path(i).name: i for i in range(len(dataset))}  # type: ignore[union-attr]
    texts = encoder.texts([text for _, text, _ in rows])
    cosine = (images[[index[image] for image, _, _ in rows]] * texts).sum(dim=1)
    assert 0 < (cosine < 0).sum() < len(rows)
    similarity = cosine.clamp(min=0)
    for name, score in scores.items():
        expected = stats.kendalltau(similarity, [rating for *_, rating in rows], variant=name[-1]).statistic
        assert score.value == pytest.approx(expected, abs=1e-9)
        assert score.n == len(rows) and score.chance == 0
        assert score.low is not None and score.high is not None and score.low <= score.value <= score.high
    assert tuple(scores) == TAUS


@settings(max_examples=4, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 4)), min_size=4, max_size=60
    ).filter(lambda rows: all(len(set(column)) > 1 for column in zip(*rows, strict=True)))
)
def test_images_are_resampled_with_all_their_judgments(rows: list[tuple[int, int, int]]) -> None:
    image, similarity, rating = torch.tensor(rows, dtype=torch.float64).unbind(dim=1)
    for name in TAUS:
        estimate = METRICS[name].function(Judgments(similarity=similarity, rating=rating, image=image.long()))  # type: ignore[arg-type]
        assert estimate is not None
        expected = stats.kendalltau(similarity, rating, variant=name[-1]).statistic
        assert math.isclose(estimate.value, expected, abs_tol=1e-12) and estimate.n == len(rows)
        assert estimate.low <= estimate.value <= estimate.high


def test_the_command_scores_both_files_of_a_folder(tmp_path: Path, model: CLIP) -> None:
    folder = tmp_path / "flickr8k"
    write_layout(folder, 1000)
    save_model(remove_mean(model, ['A photo depicts A "dog" number 7, and 1 cats']), tmp_path / "model")
    command = ["judgments", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "results.jsonl")]
    assert main([*command, "--data", str(folder)]) == 0
    assert (
        main([*command, "--data", "flickr8k-Expert", "--data-root", str(tmp_path), "--prompts", "plain"]) == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    scored = [(line["dataset"], line["metric"][-1], line["prompt_set"], line["n"]) for line in lines]
    assert scored == [
        ("flickr8k-Expert", "b", "clipscore", 6000), ("flickr8k-Expert", "c", "clipscore", 6000),
        ("flickr8k-CrowdFlower", "b", "clipscore", 3000), ("flickr8k-CrowdFlower", "c", "clipscore", 3000),
        ("flickr8k-Expert", "b", "plain", 6000), ("flickr8k-Expert", "c", "plain", 6000),
    ]  # fmt: skip
    assert lines[0]["captions"] != lines[4]["captions"]
    lines_of_file = (folder / "ExpertAnnotations.txt").read_text().splitlines()
    (folder / "ExpertAnnotations.txt").write_text("\n".join(lines_of_file[:-3]))
    with pytest.raises(DataError, match="has 999 images, its card says 1,000"):
        main([*command, "--data", str(folder / "ExpertAnnotations.txt")])


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "ExpertAnnotations.txt",
            "2_a.jpg\t1_a.jpg#",
            "2_a.jpg\t7_a.jpg#",
            "line 8: .* has no caption 7_a.jpg#",
        ),
        (
            "ExpertAnnotations.txt",
            "2_a.jpg\t1_a.jpg#",
            "9_a.jpg\t1_a.jpg#",
            "line 8: .* no captions of 9_a.jpg",
        ),
        ("ExpertAnnotations.txt", "2_a.jpg\t1_a.jpg#", "2_a.jpg\t1_a.jpg#9", "has no caption 1_a.jpg#9"),
        (
            "ExpertAnnotations.txt",
            "2_a.jpg\t1_a.jpg#",
            "2_a.jpg 1_a.jpg#",
            "line 8 is not as published: '2_a",
        ),
        ("CrowdFlowerAnnotations.txt", "\t0\t0\t3", "\t2\t0\t3", "is not as published"),
        ("captions.txt", "image,caption", "a,b,c", "captions.txt"),
    ],
)
def test_damaged_files_are_errors(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    write_layout(tmp_path, 4)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    annotations = "ExpertAnnotations.txt" if file == "captions.txt" else file
    with pytest.raises(DataError, match=said) as caught:
        open_dataset(tmp_path / annotations)
    assert "\n" not in str(caught.value)


def test_a_number_of_two_captions_is_an_error(tmp_path: Path) -> None:
    write_layout(tmp_path, 4, tokens=True)
    captions = tmp_path / "Flickr8k.token.txt"
    captions.write_text(captions.read_text().replace("2_a.jpg#1", "2_a.jpg#0"))
    with pytest.raises(DataError, match=r"row 4: 2_a\.jpg#0 occurs twice"):
        open_dataset(tmp_path / "ExpertAnnotations.txt")


def test_missing_parts_are_errors(tmp_path: Path, model: CLIP, write_dataset: WriteDataset) -> None:
    write_layout(tmp_path / "set", 3)
    file = tmp_path / "set/ExpertAnnotations.txt"
    dataset = open_dataset(file)
    with pytest.raises(Unavailable, match="only the task judgments"):
        select_tasks(dataset, ["retrieval"])
    with pytest.raises(Unavailable, match="has no human judgments"):
        select_tasks(open_dataset(write_dataset(captions=["a"] * 22 + ["b"])), ["judgments"])
    (tmp_path / "set/images/1_a.jpg").unlink()
    with pytest.raises(DataError, match=r"1_a\.jpg: No such file"):
        open_dataset(file)
    (tmp_path / "set/captions.txt").unlink()
    with pytest.raises(DataError, match=r"no Flickr8k\.token\.txt or captions\.txt with the captions"):
        open_dataset(file)


def test_equal_judgments_have_no_correlation(tmp_path: Path, model: CLIP) -> None:
    write_layout(tmp_path, 3)
    file = tmp_path / "ExpertAnnotations.txt"
    text = file.read_text()
    file.write_text("".join(f"{line.rsplit(maxsplit=3)[0]}\t2\t2\t2\n" for line in text.splitlines()))
    with pytest.raises(DataError, match=r"all judgments are 2, so tau"):
        evaluate(model, open_dataset(file))
    file.write_text(text)
    (tmp_path / "captions.txt").write_text(
        "image,caption\n" + "".join(f"{i}_a.jpg,{'b' if i == 2 else 'a'}\n" * 2 for i in range(3))
    )
    with pytest.raises(DataError, match=r"all similarities are .*, so tau"):
        evaluate(model, open_dataset(file))


def test_grades_of_a_table_are_judgments(tmp_path: Path, model: CLIP) -> None:
    rows = [(f"{i}.png", f"number {k}", (i * k) % 4) for i in range(5) for k in range(3)]
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    table = "\n".join(",".join(map(str, row)) for row in [("image", "caption", "rating"), *rows])
    (tmp_path / "pairs.csv").write_text(table)
    (tmp_path / "card.toml").write_text(
        'tasks = ["judgments"]\nmetric = "kendall_tau_b"\n[table]\ncaption = "caption"\ngrade = "rating"\n'
    )
    scores = evaluate(model, str(tmp_path))
    assert [(score.metric, score.n, score.prompt_set) for score in scores] == [(tau, 15, "") for tau in TAUS]
