"""Tests of retrieval on a table with one row per query and image, and the relevance of the image."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from clipkit import CLIP
from clipkit.errors import DataError
from eval import Encoder, Subject, evaluate
from eval.compare import compare
from eval.datasets.targets import Target, find_targets
from eval.metrics import get_metric
from eval.results.records import append_results, read_all_details, write_details
from eval.tasks import Options
from eval.tasks.retrieval import retrieval
from tests.eval.conftest import png

METRICS = ("nDCG@10", "MRR", "MRR@2", "P@2", "MAP@100", "ERR", "RBP", "RBP_0.9")
QUERIES = ("red shoes", "a hat", "blue bag", "nothing like it")
# by query, the score of each of six products; None without a row
SCORES = (
    (3, 2, 1, 0, None, None),
    (None, None, None, 4, 2, None),
    (0, None, 1, None, 1.5, None),
    (None, 0, None, None, None, 0),
)
CARD = """
tasks = ["retrieval"]
metric = "text_to_image_nDCG@10"
further = [METRICS]
[table]
image = "picture"
caption = "query"
grade = "score_linear"
""".replace("METRICS", ", ".join(f'"text_to_image_{name}"' for name in METRICS))


def write_products(folder: Path, rows: str = "") -> Path:
    """Write a table in GCL's layout, whose column title is none of queries, its images and a card."""
    folder.mkdir()
    lines = ["query,product_id,title,picture,score_linear"]
    for i in range(6):
        (folder / f"{i}.png").write_bytes(png(i))
    for (q, query), i in product(enumerate(QUERIES), range(6)):
        if SCORES[q][i] is not None:
            lines.append(f"{query},{i},title {i},{i}.png,{SCORES[q][i]}")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n" + rows)
    (folder / "card.toml").write_text(CARD)
    return folder


def open_products(folder: Path) -> Target:
    (target,) = find_targets([str(folder)])
    return target


def subject_of(model: CLIP, target: Target, similarity: torch.Tensor) -> Subject:
    """Return the dataset with features of which these are the similarities of queries and images, (4, 6)."""
    subject = Subject(Encoder(model), target.dataset, metrics=target.metrics)
    images = F.pad(torch.eye(6), (0, model.dim - 6))
    row = {text: i for i, text in enumerate(QUERIES)}
    texts = F.pad(similarity, (0, model.dim - 6))
    subject.images().__dict__["projected"] = images
    subject.encoder.texts = lambda wanted, **_: texts[[row[text] for text in wanted]]  # type: ignore[method-assign]
    return subject


def test_rows_of_a_table_are_graded_pairs(tmp_path: Path) -> None:
    dataset = open_products(write_products(tmp_path / "shop")).dataset
    assert dataset.captions is not None and dataset.grades is not None
    assert dataset.captions[0] == ("red shoes", "blue bag") and dataset.grades[0] == (3, 0)
    pairs = {
        (text, i): grade
        for i, (texts, grades) in enumerate(zip(dataset.captions, dataset.grades, strict=True))
        for text, grade in zip(texts, grades, strict=True)
    }
    expected = {
        (query, i): SCORES[q][i]
        for (q, query), i in product(enumerate(QUERIES), range(6))
        if SCORES[q][i] is not None
    }
    assert pairs == expected


def test_scores_of_graded_pairs_are_means_over_queries(
    model: CLIP, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = open_products(write_products(tmp_path / "shop"))
    similarity = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    subject = subject_of(model, target, similarity)
    outcome = retrieval(subject, Options())
    assert caplog.messages[-1].startswith(
        "dataset shop: 1 text and 1 image have no pair with a grade above 0: they are candidates"
    )
    scores = {score.metric: score for score in outcome.scores}
    assert next(iter(scores)) == "text_to_image_nDCG@10"
    ndcg = scores["text_to_image_nDCG@10"]
    by_query = []
    for q in range(3):
        grades = torch.tensor([float(score or 0) for score in SCORES[q]])
        discount = torch.log2(torch.arange(6) + 2.0)
        dcg = (grades[similarity[q].argsort(descending=True)] / discount).sum()
        by_query.append(float(dcg / (grades.sort(descending=True).values / discount).sum()))
    assert ndcg.value == pytest.approx(sum(by_query) / 3) and ndcg.n == 3
    assert ndcg.low is not None and ndcg.high is not None and ndcg.low < ndcg.value < ndcg.high
    assert ndcg.chance is not None and 0.3 < ndcg.chance < 0.8
    for name in METRICS:
        assert 0 <= scores[f"text_to_image_{name}"].value <= 1 and scores[f"text_to_image_{name}"].n == 3
    precision = scores["text_to_image_P@2"]
    assert precision.chance == pytest.approx((3 + 2 + 2) / 6 / 3, abs=0.02)
    # each query once, though it has several images
    assert scores["text_to_image_R@1"].n == 3 and scores["image_to_text_R@1"].n == 5
    first = [float(SCORES[q][int(similarity[q].argmax())] or 0) > 0 for q in range(3)]
    assert scores["text_to_image_R@1"].value == pytest.approx(sum(first) / 3)
    assert scores["text_to_image_P@2"].value == pytest.approx(
        sum(float(SCORES[q][int(i)] or 0) > 0 for q in range(3) for i in similarity[q].topk(2).indices) / 6
    )
    (details,) = outcome.details
    assert details.n == 5 and details.values["text_to_image_nDCG@10"].n == 3
    assert {example.picture for example in details.examples} <= set("01234")
    best = subject_of(model, target, torch.tensor([[float(s or 0) for s in row] for row in SCORES]))
    assert {score.value for score in retrieval(best, Options()).scores if "nDCG" in score.metric} == {1.0}


def test_graded_metrics_of_two_models_are_compared(model: CLIP, tmp_path: Path) -> None:
    target = open_products(write_products(tmp_path / "shop"))
    files = []
    generator = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        outcome = retrieval(subject_of(model, target, torch.randn(4, 6, generator=generator)), Options())
        files.append(tmp_path / f"{name}.jsonl")
        facts = {"weights": name, "model": name, "data_revision": target.dataset.revision}
        append_results(files[-1], outcome.scores, step=None, provenance=facts)
        for details in outcome.details:
            write_details(files[-1], details, weights=name)
    differences = {one.metric: one for one in compare(files, "a", "b").differences}
    for name in METRICS:
        metric = f"text_to_image_{name}"
        assert get_metric(metric) is not None
        test = differences[metric].test
        assert test.difference == pytest.approx(
            differences[metric].second - differences[metric].first, abs=1e-6
        )
        assert test.low <= test.difference <= test.high and test.n == 3
    assert read_all_details(files)[0]


def test_scores_without_a_card_do_not_change(model: CLIP, tmp_path: Path) -> None:
    """Rows with equal grades are as pairs, except that a query counts once."""
    folder = write_products(tmp_path / "shop")
    lines = (folder / "pairs.csv").read_text().splitlines()
    kept = [line.rpartition(",")[0] + ",1" for line in lines[1:] if not line.endswith(",0")]
    (folder / "pairs.csv").write_text("\n".join([lines[0], *kept]))
    graded = open_products(folder)
    (folder / "card.toml").write_text(CARD.replace('grade = "score_linear"', ""))
    plain = open_products(folder)
    assert plain.dataset.grades is None and plain.dataset.captions == graded.dataset.captions
    similarity = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    values = []
    for target in (graded, plain):
        scores = evaluate(subject_of(model, target, similarity), tasks=["retrieval"])
        values.append({score.metric: (score.value, score.n) for score in scores})
    assert values[0]["image_to_text_R@1"] == values[1]["image_to_text_R@1"]
    assert values[0]["text_to_image_R@1"][1] == 3 and values[1]["text_to_image_R@1"][1] == 7


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a hat,3,t,3.png,", "row 12 has score_linear '': expected a number of 0 or more"),
        ("a scarf,3,t,3.png,high", "row 12 has score_linear 'high'"),
        ("a scarf,3,t,3.png,-1", "row 12 has score_linear '-1'"),
        ("a scarf,3,t,3.png,nan", "row 12 has score_linear 'nan'"),
        (
            "a hat,3,t,3.png,1",
            "row 12 has score_linear '1': .*the same in all rows with the same image",
        ),
    ],
)
def test_bad_grades_are_one_line(tmp_path: Path, row: str, message: str) -> None:
    folder = write_products(tmp_path / "shop", rows=row + "\n")
    with pytest.raises(DataError, match=message):
        open_products(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"score_linear"', '"score"', r"pairs.csv has no column 'score' \(known: .*score_linear"),
        ('"query"', '"querry"', r"pairs.csv has no column 'querry' \(did you mean 'query'"),
        ('caption = "query"\n', "", "table.grade needs table.caption"),
        ("[table]", '[table]\nfiles.test = "gone.csv"', "gone.csv is not a file"),
        ("[table]", '[table]\nfiles.dev = "pairs.csv"', "card.toml"),
        ("[table]", '[table]\nfiles.train = "pairs.csv"', "has no split 'test': files of "),
        ("nDCG@10", "NDCG@10", "'text_to_image_NDCG@10' does not apply to retrieval"),
    ],
)
def test_mistakes_of_a_card_with_a_table_are_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    folder = write_products(tmp_path / "shop")
    (folder / "card.toml").write_text(CARD.replace(old, new, 1))
    with pytest.raises(DataError, match=message) as error:
        open_products(folder)
    assert "\n" not in str(error.value)


def test_several_tables_need_names(tmp_path: Path) -> None:
    folder = write_products(tmp_path / "shop")
    (folder / "more.csv").write_bytes((folder / "pairs.csv").read_bytes())
    with pytest.raises(
        DataError, match=re.escape("has 2 tables (more.csv, pairs.csv): name that of each split")
    ):
        open_products(folder)
    (folder / "card.toml").write_text(CARD + 'files = { test = "pairs.csv", train = "more.csv" }\n')
    target = open_products(folder)
    assert target.open_split("train").grades == target.dataset.grades


def test_metrics_of_more_candidates_than_there_are_get_a_line(
    model: CLIP, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = open_products(write_products(tmp_path / "shop")).dataset
    metrics = ("text_to_image_R@6", "text_to_image_P@7", "image_to_text_R@3", "text_to_image_nDCG@9")
    scores = evaluate(Subject(Encoder(model), dataset, metrics=metrics), tasks=["retrieval"])
    assert {score.metric for score in scores} & {*metrics} == {*metrics[2:]}
    for name in metrics[:2]:
        assert f"dataset shop: {name} is left out, because there are only 6 candidates" in caplog.messages
    assert not any("R@10" in message for message in caplog.messages)


def test_texts_of_products_are_combined_with_images(model: CLIP, tmp_path: Path) -> None:
    folder = write_products(tmp_path / "shop")
    fields = "image_fields = { image = 0.9, title = 0.1 }\n"
    (folder / "card.toml").write_text(CARD + fields)
    target = open_products(folder)
    plain = open_products(write_products(tmp_path / "plain"))
    assert target.dataset.image_fields["title"][1] == tuple(f"title {i}" for i in range(6))
    assert target.dataset.revision != plain.dataset.revision
    subject = Subject(Encoder(model), target.dataset, metrics=target.metrics)
    scores = {score.metric: score.value for score in evaluate(subject, tasks=["retrieval"])}
    titles = subject.texts([f"title {i}" for i in range(6)])
    documents = F.normalize(0.9 * subject.images().projected + 0.1 * titles, dim=1)
    other = Subject(Encoder(model), plain.dataset, metrics=plain.metrics)
    other.images().__dict__["projected"] = documents
    expected = {score.metric: score.value for score in evaluate(other, tasks=["retrieval"])}
    assert scores == pytest.approx(expected)
    table = (folder / "pairs.csv").read_text()
    for old, new, message in (
        (",title,", ",name,", "has no column 'title'"),
        (",title 3,", ",,", "3.png: no text in title"),
    ):
        (folder / "pairs.csv").write_text(table.replace(old, new))
        with pytest.raises(DataError, match=message):
            open_products(folder)
    (folder / "card.toml").write_text(CARD + "image_fields = { title = 0.1 }\n")
    with pytest.raises(DataError, match=r"table\.image_fields needs a weight of image"):
        open_products(folder)


def test_column_of_labels_may_be_that_of_queries(tmp_path: Path) -> None:
    folder = write_products(tmp_path / "products")
    table = folder / "pairs.csv"
    table.write_text(table.read_text().replace("query,", "label,", 1))
    (folder / "card.toml").write_text(CARD.replace('"query"', '"label"'))
    dataset = open_products(folder).dataset
    assert dataset.captions is not None and dataset.labels is None
    assert {text for texts in dataset.captions for text in texts} == set(QUERIES)


def test_all_judgments_of_an_image_count(tmp_path: Path) -> None:
    rows = "".join(f"query {i},0,title,0.png,1\n" for i in range(150))
    dataset = open_products(write_products(tmp_path / "shop", rows)).dataset
    assert dataset.captions is not None
    assert {f"query {i}" for i in range(150)} <= set(dataset.captions[0])


def test_a_single_query_ranks_images_by_grade(model: CLIP, tmp_path: Path) -> None:
    folder = write_products(tmp_path / "shop")
    (folder / "pairs.csv").write_text("query,picture,score_linear\nred shoes,0.png,1\nred shoes,1.png,2\n")
    (folder / "card.toml").write_text(CARD.replace("_nDCG@10", "_nDCG@1", 1))
    target = open_products(folder)
    images = Subject(Encoder(model), target.dataset).images().projected
    text = Encoder(model).texts(["red shoes"]).cpu()
    score = evaluate(model, str(folder))[0]
    best = int((images @ text.T).argmax())
    assert score.metric == "text_to_image_nDCG@1" and score.n == 1
    assert score.value == pytest.approx([1 / 2, 1][best] if best else 1 / 2)


def test_grades_with_separators_of_python_are_no_numbers(tmp_path: Path) -> None:
    folder = write_products(tmp_path / "shop", "a hat,5,title,5.png,1_0\n")
    with pytest.raises(DataError, match="has score_linear '1_0': expected a number"):
        open_products(folder)
