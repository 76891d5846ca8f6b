"""Tests of the comparison page: well-formed, self-contained, and explicit about missing scores."""

import cProfile
import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from clipkit.errors import DataError
from eval.datasets.dataset import EvalDataset
from eval.report import as_csv, as_latex, as_markdown, build_comparison
from eval.report.charts import Thumbnails
from eval.report.comparison_page import Block, blocks_html, name_family
from eval.report.tables import format_setting, read_scores, score_table
from eval.results.details import item_details, prediction_details
from eval.results.records import Details, write_details
from eval.results.table import Model, read_table
from tests.eval.made_up_results import DATASETS, EVIL, MODELS, PNG, add_details, line, made_up, write
from tests.eval.web_page import Page

LABELS = ["ViT-B-32/openai", "ViT-B-32/laion2b_s34b_b79k"]
FULL = ("zero-shot", "linear-probe", "few-shot", "layers")
SUITES = {"paper": DATASETS[:3], "more": DATASETS[1:6]}
PUBLISHED = {dataset: {"ViT-B-32": 0.5, "ViT-X": 0.9} for dataset in DATASETS[:3]}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = write(tmp_path / "results.jsonl", made_up(3, DATASETS[:5], tasks=FULL))
    add_details(path, 2, DATASETS[:2])
    return path


def built(*results: Path, **more: Any) -> Any:
    out = build_comparison(results, results[0].with_name("page.html"), **more)
    return Page(out.read_text(encoding="utf-8"))


def test_page_shows_every_part(results: Path) -> None:
    page = built(results, suites=SUITES, published=PUBLISHED, primary={"cifar10": "acc5"})
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert ids == ["scores", "probe", "cost", "few-shot", "layers", "datasets", "all", "about"]
    assert "3 models on 5 datasets" in page.words
    assert "over the 4 of 5 datasets that all models have" in page.words
    assert "ViT-B-32 published" in page.words
    assert "ViT-X" not in page.words  # no such model is shown
    assert "mean of 5 datasets" in page.words  # of the few-shot curves
    assert "expected calibration error" in page.words
    assert "on the diagonal" in page.words
    assert "rank 7 of 10" in page.words
    assert "sha256:0000000000000000" in page.words
    assert not any(a.get("class") == "notes" for _, a in page.tags)
    plots = [a for _, a in page.tags if a.get("class") == "plot"]
    assert len(plots) == 6  # three of them linear probes over cost
    assert all(a.get("aria-label") for a in plots)


def test_nothing_is_fetched_and_text_is_escaped(tmp_path: Path) -> None:
    lines = [
        line(i, EVIL + str(j), EVIL if j else "acc1", 0.5, task=EVIL if j > 1 else "zero-shot")
        for i in (0, 1)
        for j in range(3)
    ]
    lines += [
        {**one, "model": f"{EVIL}{i}", "weights": EVIL, "architecture": EVIL, "dtype": EVIL, "setting": EVIL}
        for i, one in enumerate(lines)
    ]
    lines += [
        line(0, EVIL, "acc1", 0.5, task=task, setting=f"{setting}, {EVIL}")
        for task, setting in (
            ("few-shot", "4-shot"),
            ("few-shot", "8-shot"),
            ("linear-probe", "layer 1"),
            ("linear-probe", "layer 2"),
        )
    ]
    path = write(tmp_path / "results.jsonl", lines)
    add_details(path, 1, [EVIL + "0"], images=[PNG, "AAAA)}</style><script>alert(1)</script>"])
    html = build_comparison(
        [path], tmp_path / "page.html", suites={EVIL: [EVIL + "0", EVIL + "1"]}
    ).read_text()
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert html.count("</style>") == 1
    assert EVIL in "".join(page.text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img")
        assert not any(name.startswith("on") or name == "src" for name in attributes)
    assert set(re.findall(r"url\((.{15})", html)) == {"data:image/png;"}
    (policy,) = (str(a["content"]) for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_means_cover_datasets_that_all_models_have(tmp_path: Path) -> None:
    values = {0: (0.2, 0.4, 0.6), 1: (0.4, 0.6, None), 2: (None, None, None)}
    lines = [
        line(model, DATASETS[i], "acc1", value)
        for model, row in values.items()
        for i, value in enumerate(row)
        if value is not None
    ]
    lines.append(line(2, "elsewhere", "acc1", 0.9))
    found = read_table([write(tmp_path / "results.jsonl", lines)])
    table = score_table(found, suites={"paper": DATASETS[:3], "empty": ("nothing",)}, published=PUBLISHED)
    assert [one.dataset for one in table.lines] == [*DATASETS[:3], "elsewhere"]
    assert table.lines[2].cells.keys() == {0}
    assert table.published == ("ViT-B-32",)
    paper = table.averages[0]
    assert (paper.suite, paper.over, paper.of) == ("paper", 2, 3)
    assert paper.values == pytest.approx({0: 0.3, 1: 0.5}) and paper.partial
    assert paper.published == {"ViT-B-32": 0.5}


def test_prompt_sets_and_directions_are_not_mixed(tmp_path: Path) -> None:
    lines = [
        line(0, "digits", "acc1", 0.4),
        line(0, "digits", "acc1", 0.9, prompt_set="own"),
        line(1, "digits", "acc1", 0.5),
    ]
    pair = {"task": "retrieval", "prompt_set": ""}
    lines += [
        line(0, "coco", f"{way}_R@1", value, **pair)
        for way, value in (("image_to_text", 0.6), ("text_to_image", 0.4))
    ]
    lines += [line(0, "digits", "mean_rank", 30.0, **pair, low=None, high=None)]
    table = score_table(read_table([write(tmp_path / "r.jsonl", lines)]), suites={"all": ["digits", "coco"]})
    shown = [(one.dataset, one.note, one.metric, one.counted) for one in table.lines]
    assert shown == [
        ("digits", "zero-shot, prompts openai", "acc1", True),
        ("digits", "zero-shot, prompts own", "acc1", False),
        ("digits", "retrieval", "mean_rank", False),
        ("coco", "", "image_to_text_R@1", True),
        ("coco", "", "text_to_image_R@1", True),
    ]
    assert table.averages == ()  # no two datasets that both models have
    path = write(tmp_path / "r.jsonl", [one for one in lines if one["model"] == MODELS[0][0]])
    alone = score_table(read_table([path]), suites={"all": ["digits", "coco"]})
    (mean,) = alone.averages
    assert mean.values[0] == pytest.approx((0.4 + 0.5) / 2) and mean.tasks == ("zero-shot", "retrieval")
    assert score_table(read_table([path])).averages == ()  # no protocol has a mean of both tasks


def test_old_and_broken_lines_and_earlier_steps_are_noted(tmp_path: Path) -> None:
    old = {
        "step": 100,
        "dataset": "digits",
        "task": "zero-shot",
        "metric": "acc1",
        "value": 0.1,
        "n": 1797,
        "weights": "run at step 100",
    }
    path = write(
        tmp_path / "results.jsonl", [old, {**old, "step": 200, "value": 0.3, "weights": "run at step 200"}]
    )
    with path.open("ab") as file:
        file.write(
            b'[1]\nnull\n{"dataset": "digits", "task": "zero-shot", "metric": "acc1", "value": NaN}\n{"cut'
        )
    write(
        tmp_path / "b.jsonl",
        [
            line(0, "digits", "acc1", 0.5, n=1797),
            line(0, "digits", "acc1", 0.6, n=1797),
            line(1, "digits", "acc1", 0.7),
        ],
    )
    found = read_table([path, tmp_path / "b.jsonl"])
    assert [model.label for model in found.models] == ["run", "ViT-B-32/openai", "ViT-B-32/laion2b_s34b_b79k"]
    assert [row.value for row in found.rows] == [0.3, 0.6, 0.7]  # the last step, the last line
    assert found.rows[0].split == "test"
    text = " ".join(found.notes)
    assert "3 lines cut short or broken" in text
    assert "1 line without a dataset, task, metric or finite value" in text
    assert "1 score of earlier steps" in text
    assert "Not all models were scored with the same images on digits" in text
    with pytest.raises(DataError, match="there are no scores in"):
        read_table([write(tmp_path / "empty.jsonl", [])])
    with pytest.raises(DataError, match="no results file at"):
        build_comparison([tmp_path / "nothing"], tmp_path / "page.html")


def test_page_of_one_model_and_labels_of_equal_names(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", made_up(1, DATASETS[:1]))
    page = built(path)
    assert "ViT-B-32/openai on imagenet1k" in page.words
    assert "95% interval" in page.words
    write(path, [line(0, "digits", "acc1", 0.5), line(0, "digits", "acc1", 0.6, weights="sha256:ffff")])
    labels = [model.label for model in read_table([path]).models]
    assert labels == ["ViT-B-32/openai (000000000000)", "ViT-B-32/openai (ffff)"]
    write(path, [line(i, "digits", "acc1", 0.5) for i in (10, 11)])
    assert [model.label for model in read_table([path]).models] == ["quickstart", "glyphs"]


def test_few_shot_curves_average_shared_datasets(tmp_path: Path) -> None:
    lines = []
    for model in (0, 1):
        for i, dataset in enumerate(("a", "b", "c")[: 3 - model]):
            lines.append(line(model, dataset, "acc1", 0.5))
            for k in (1, 4):
                more = {"task": "few-shot", "setting": f"{k}-shot", "prompt_set": ""}
                lines += [
                    line(model, dataset, "acc1", 0.2 + 0.1 * i + 0.1 * k, **more),
                    line(model, dataset, "acc1_std", 0.02, **more),
                ]
    page = built(write(tmp_path / "results.jsonl", lines))
    assert (
        "mean of the 2 of 3 datasets that all have; band: ± standard deviation over seeds of the mean"
        in page.words
    )
    chart = json.loads(next(str(a["data-chart"]) for _, a in page.tags if "data-chart" in a))
    assert chart["ticks"] == {"0": "0", "1": "1", "2": "4"}
    assert chart["lines"][0]["x"] == [0, 1, 2]
    assert chart["lines"][0]["y"] == pytest.approx([50, 35, 65])


def test_same_results_give_same_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", made_up(4, DATASETS[:8]))
    first = build_comparison([path], tmp_path / "page.html", suites={"all": DATASETS}).read_bytes()
    assert build_comparison([path], tmp_path / "again.html", suites={"all": DATASETS}).read_bytes() == first


def test_work_and_size_grow_with_the_number_of_scores(tmp_path: Path) -> None:
    """Compare calls and bytes of a page with those of a page with a quarter of the scores."""
    calls, sizes = [], []
    for models in (5, 20):
        path = write(tmp_path / "results.jsonl", made_up(models, DATASETS))
        profile = cProfile.Profile()
        page = profile.runcall(build_comparison, [path], tmp_path / "page.html", suites={"all": DATASETS})
        calls.append(sum(stat.callcount for stat in profile.getstats()))
        sizes.append(page.stat().st_size)
    assert calls[1] < 5 * calls[0]
    assert sizes[0] < sizes[1] < 5_000_000


def test_details_of_nine_models_per_dataset_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", made_up(12, DATASETS[:10]))
    add_details(path, 12, DATASETS[:10], classes=30)
    (path.with_name("results.details") / "broken.json").write_text("{")
    page = built(path)
    assert "The first 9 models of each dataset are shown." in page.words
    assert "results.details: broken.json cannot be read" in page.words
    assert page.words.count("expected calibration error") == 90


def test_csv_latex_and_markdown_tables(tmp_path: Path) -> None:
    lines = made_up(2, DATASETS[:3], tasks=("zero-shot", "linear-probe"))
    lines.append(
        line(1, "[odd] | 50%_\\~ & \ud800", "mean_rank", 12.5, task="retrieval", low=None, high=None)
    )
    path = write(tmp_path / "results.jsonl", lines)
    more: dict[str, Any] = {"suites": SUITES, "published": PUBLISHED, "primary": {"cifar10": "acc5"}}
    text = as_csv([path], **more)
    rows = list(csv.DictReader(io.StringIO(text)))
    scores = [row for row in rows if row["kind"] == "score"]
    assert len(scores) == len(lines)
    for row, one in zip(scores[:-1], lines, strict=False):
        assert row["model"] in LABELS and (row["metric"], row["n"]) == (one["metric"], "5000")
        for name in ("value", "low", "high", "chance"):
            assert float(row[name]) == pytest.approx(one[name], rel=1e-5)
    assert [scores[-1][name] for name in ("dataset", "value", "low")] == ["[odd] | 50%_\\~ & ?", "12.5", ""]
    means = [row for row in rows if row["kind"] == "mean"]
    assert [means[0][name] for name in ("dataset", "task", "n")] == ["paper", "zero-shot", "3"]
    others = [row for row in rows if row["kind"] == "published"]
    assert {(row["model"], row["value"]) for row in others} == {("ViT-B-32", "0.5")} and len(others) == 3
    assert as_csv([path], **more) == text
    latex = as_latex([path], **more)
    assert "\\begin{tabular}{lllrrr}" in latex
    assert latex.count("\\midrule") == 3
    assert (
        "\n{[}odd] | 50\\%\\_\\textbackslash{}\\textasciitilde{} \\& ? & retrieval & mean rank & -- & 12.5"
        in latex
    )
    assert latex.count("\\textbf{") == latex.count(r" \\") - 2  # not the header, nor the row of one model
    markdown = as_markdown([path], **more)
    assert "| \\[odd\\] \\| 50%\\_\\\\~ & ? | retrieval | mean rank |  | 12.5 |  |" in markdown
    assert markdown.splitlines()[2].startswith("| mean of paper | zero-shot | over 3 |")
    assert markdown.splitlines()[2].endswith("| 50.0 |")


@pytest.mark.parametrize(
    ("more", "notes", "said"),
    [
        ({"data_revision": "r2"}, ("data r1", "data r2"), "(revisions r1 and r2)"),
        ({"n": 20}, ("n = 5,000", "n = 20"), "(n = 5,000 and 20)"),
    ],
)
def test_scores_of_other_data_have_separate_rows(
    tmp_path: Path, more: dict[str, Any], notes: tuple[str, str], said: str
) -> None:
    same = {"data_revision": "r1"}
    lines = [
        line(model, name, "acc1", 0.4 + model / 9, **same) for model in (0, 1) for name in ("a", "b", "c")
    ]
    lines += [
        line(2, name, "acc1", 0.9, **{**same, **(more if name == "c" else {})}) for name in ("a", "b", "c")
    ]
    lines += [line(model, "d", "acc1", 0.5, **{"data_revision": ""}) for model in (0, 1)]  # unknown revision
    path = write(tmp_path / "r.jsonl", lines)
    found = read_table([path])
    table = score_table(found)
    shown = {(row.dataset, row.note): (list(row.cells), row.counted) for row in table.lines}
    assert shown["a", ""] == ([0, 1, 2], True)
    assert shown["c", notes[0]] == ([0, 1], True)
    assert shown["c", notes[1]] == ([2], False)
    assert shown["d", ""] == ([0, 1], True)
    (mean,) = table.averages
    assert (mean.over, mean.of) == (2, 4) and mean.values[2] == pytest.approx(0.9)
    told = f"Not all models were scored with the same images on c {said}: these scores are not comparable."
    assert found.notes == (told,)
    assert told in built(path).words
    rows = [row for row in as_markdown([path]).splitlines() if row.startswith("| c ")]
    assert rows[0].startswith(f"| c ({notes[0]}) |") and "**51.1**" in rows[0] and "90.0" not in rows[0]
    assert rows[1].startswith(f"| c ({notes[1]}) |") and "**" not in rows[1] and "51.1" not in rows[1]


def test_a_model_scored_again_on_other_data_is_noted(tmp_path: Path) -> None:
    lines = [line(0, "test", "acc1", value, data_revision=f"r{value}") for value in (0.1, 0.2)]
    found = read_table([write(tmp_path / "r.jsonl", lines)])
    assert [row.value for row in found.rows] == [0.2]
    assert found.notes == (
        "Replaced by later scores on different images with the same name: test (revision r0.1).",
    )


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1"])
def test_csv_names_cannot_be_formulas(tmp_path: Path, name: str) -> None:
    lines = [line(0, name, "mean_rank", -2.5), {**line(1, "safe-=", "acc1", 0.5), "model": name}]
    rows = list(csv.DictReader(io.StringIO(as_csv([write(tmp_path / "r.jsonl", lines)]))))
    assert rows[1]["model"] == f"'{name.strip()}"
    assert rows[0]["dataset"] == f"'{name.strip()}" and rows[1]["dataset"] == "safe-="
    assert rows[0]["value"] == "-2.5"  # numbers are unchanged


def test_text_tables_have_no_control_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [{**line(0, "a\x1b[2Jb", "acc1", 0.5), "model": "m\x9b\x00"}])
    for form in (as_csv, as_latex, as_markdown):
        assert form([path]).replace("\n", "").isprintable()


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(10**20), 10**20),
    st.text(max_size=6),
    st.lists(st.none(), max_size=1),
)
_SETTINGS = st.sampled_from(["", "1-shot", "4-shot logistic", "0-shot", "layer 3", "layer 9999", "k=20"])
_LINES = st.fixed_dictionaries(
    {
        "dataset": st.sampled_from(["a", "b", "<c>"]),
        "task": st.sampled_from(["zero-shot", "few-shot", "linear-probe", "retrieval", "odd"]),
        "metric": st.sampled_from(
            ["acc1", "acc1_std", "image_to_text_R@1", "text_to_image_R@1", "mean_rank"]
        ),
        "value": st.one_of(st.floats(0, 1), st.floats(-1e308, 1e308), _ODD),
    },
    optional={
        "model": st.one_of(st.sampled_from(["x", "x/y", "open_clip:x", "/", ":"]), _ODD),
        "setting": st.one_of(_SETTINGS, _ODD),
        **dict.fromkeys(
            ("step", "n", "low", "high", "chance", "seconds", "weights", "gflops", "prompt_set", "split"),
            _ODD,
        ),
        "architecture": st.one_of(st.sampled_from(["ViT-B-32", "ViT-B-16-quickgelu"]), _ODD),
    },
)


@settings(max_examples=40, deadline=None)
@given(lines=st.lists(_LINES, max_size=12))
def test_any_lines_give_a_page_or_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    path = write(folder / "results.jsonl", lines)
    more: dict[str, Any] = {
        "suites": {"s": ["a", "b"]},
        "published": {"a": {"ViT-B-32": 0.5}},
        "primary": {"b": "acc1"},
    }
    try:
        page = built(path, **more)
    except DataError:
        return
    assert "nan%" not in page.words
    for table in (as_csv, as_latex, as_markdown):
        table([path], **more)


def test_every_task_and_setting_has_its_rows_and_means(tmp_path: Path) -> None:
    lines = []
    for name, most in (("a", 16), ("b", 4)):
        for k in (k for k in (1, 4, 16) if k <= most):
            for estimator, value in (("", 0.2), (" logistic", 0.3)):
                more = {"task": "few-shot", "setting": f"{k}-shot{estimator}", "prompt_set": ""}
                more["options"] = "shots=(1, 4) seeds=(0,)" if most == 4 else "shots=(1, 4, 16) seeds=(0,)"
                lines.append(line(0, name, "acc1", value + k / 40, **more))
                lines.append(line(0, name, "acc1_std", 0.0, **more, **{"n": 1, "low": None, "high": None}))
        for k in (10, 20):
            more = {"task": "knn", "setting": f"k={k}", "model_hash": "ffff", "inputs": "eeee", "lines": "8"}
            lines.append(line(0, name, "acc1", k / 100, **more))
        lines.append(line(0, name, "acc1", 0.7, task="fine-tune", setting="10 epochs"))
    few = [one for one in lines if one["task"] == "few-shot"]
    assert "few-shot" in built(write(tmp_path / "r.jsonl", few[1:2])).words  # only the deviation of one seed
    path = write(tmp_path / "r.jsonl", few)
    rows = as_markdown([path]).splitlines()
    assert "| mean of all datasets, 4-shot ridge | few-shot | over 2 | 30.0 |" in rows
    assert "| a (16-shot logistic) | few-shot | top-1 | 70.0 |" in rows
    assert not any(" std " in row for row in rows)  # of a single seed
    text = as_csv([path])
    assert text.count("\nscore,") == len(few) / 2 and "_std" not in text
    assert r"b (4-shot ridge) & few-shot" in as_latex([path])
    ways = ("image_to_text", "text_to_image", "mean")
    lines += [line(0, "c", f"{way}_R@1", 0.5, task="retrieval") for way in ways]
    path = write(path, lines)
    rows = as_markdown([path]).splitlines()
    assert "| mean of all datasets, k=20 | knn | over 2 | 20.0 |" in rows
    assert "| mean of all datasets, 10 epochs | fine-tune | over 2 | 70.0 |" in rows
    assert "| c | retrieval | mean R@1 | 50.0 |" in rows
    page = built(path)
    for said in (
        "mean of all datasets, k=20 over 2", "mean of all datasets, 10 epochs over 2", "Fine-tuned",
        "top-1 few-shot, 16-shot ridge", "mean of the datasets that all have: 2 at 1, 4; 1 at 16",
        "shots=(1, 4, 16) seeds=(0,) (a) – shots=(1, 4) seeds=(0,) (b)",
    ):  # fmt: skip
        assert said in page.words
    for unsaid in ("acc1", "ffff", "eeee", "lines", "std", "rings"):
        assert unsaid not in page.words
    (chart,) = (json.loads(str(a["data-chart"])) for _, a in page.tags if "data-chart" in a)
    assert [one["y"] for one in chart["lines"]] == [
        pytest.approx([x + 2.5, x + 10, x + 40]) for x in (20, 30)
    ]
    assert "took 10.5 seconds" in page.words  # 1.5 seconds for each of seven tasks


def test_retrieval_shows_curve_of_recall_and_ranks_without_percent(tmp_path: Path) -> None:
    ways = ("image_to_text", "text_to_image")
    common = {"task": "retrieval", "prompt_set": "", "seconds": 0.1, "chance": None}
    lines = [line(0, "pairs", f"{way}_R@1", 0.5, **common) for way in ways]
    lines += [line(0, "pairs", f"{way}_median_rank", 1.0, **common) for way in ways]
    path = write(tmp_path / "r.jsonl", lines)
    data = EvalDataset(
        name="pairs", class_names=(), templates=(), images=(), labels=None, captions=(("a",), ("b",)),  # type: ignore[arg-type]
        revision="pair", tasks=("retrieval",), prompt_set="own",
    )  # fmt: skip
    ranks = {f"{way}_mean_rank": torch.tensor([1, 1, 2, 40]) for way in ways}
    write_details(
        path, item_details(data, task="retrieval", n=4, values=ranks), weights=str(lines[0]["weights"])
    )
    page = built(path)
    assert "Found among the first k" in page.words and "median rank 1.5" in page.words
    assert "took" not in page.words  # too short, because features were stored
    assert "Examples are" not in page.words
    (chart,) = (json.loads(str(a["data-chart"])) for _, a in page.tags if "data-chart" in a)
    assert list(chart["ticks"].values()) == ["1", "3", "10", "40"]
    assert chart["lines"][0]["y"] == [50, 75, 75, 100]
    assert "100.0" not in page.words.replace("100%", "") and re.search(
        r"median rank retrieval 5,000 1 ", page.words
    )


@pytest.mark.parametrize(("baseline", "marked"), [("timm:resnet50.tv_in1k", 2), ("timm:resnet18.tv_in1k", 0)])
def test_published_differences_are_marked_for_a_resnet50_baseline(
    tmp_path: Path, baseline: str, marked: int
) -> None:
    data = ("food101", "dtd", "unknown")
    lines = [line(0, dataset, "acc1", 0.6) for dataset in data]
    for dataset in data:
        probe = line(1, dataset, "acc1", 0.5, task="linear-probe", prompt_set="")
        lines.append(probe | {"model": baseline, "weights": "other", "model_hash": "other"})
    out = build_comparison(
        [write(tmp_path / "results.jsonl", lines)],
        tmp_path / "page.html",
        paper={"food101": 0.3, "dtd": -0.2},
    )
    page = out.read_text(encoding="utf-8")
    places = [float(one) for one in re.findall(r'<b style="left:([\d.]+)%" title="published: ', page)]
    assert sorted(places) == [0.0, 100.0][:marked]  # -0.2 and 0.3 are the ends of the scale
    said = "lines: ViT-L/14@336px in the CLIP paper, better on 1 of 2"
    assert (said in page) == bool(marked) and "zero-shot is better on 3 of 3" in page


def test_chart_of_probes_over_cost_joins_models_of_a_family(tmp_path: Path) -> None:
    lines = [
        line(model, dataset, "acc1", 0.4 + 0.02 * model, task="linear-probe", prompt_set="")
        for model in range(5)
        for dataset in ("food101", "dtd")
    ]
    out = build_comparison([write(tmp_path / "results.jsonl", lines)], tmp_path / "page.html")
    page = out.read_text(encoding="utf-8")
    chart = page[page.index("lines join models of one family") :]
    chart = chart[: chart.index("</svg>")]
    assert chart.count('class="line t1"') == 2  # B-32, B-16 and L-14 of openai
    assert chart.count('class="line t1 dashed"') == 1  # L-14 at 336 pixels
    assert chart.count("<polyline") == 3  # laion's B-32 is alone


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("open_clip:ViT-L-14-336/openai", "ViT openai"),
        ("open_clip:RN50x16/openai", "RN openai"),
        ("open_clip:ViT-B-16-SigLIP/webli", "ViT SigLIP webli"),
        ("timm:resnet50.tv_in1k", "resnet tv_in1k"),
        ("runs/quickstart", ""),
        ("/data/a:b/run", ""),
    ],
)
def test_families_are_named_without_sizes(tmp_path: Path, name: str, expected: str) -> None:
    own = line(0, "dtd", "acc1", 0.5) | {"model": name}
    found = read_scores([write(tmp_path / "results.jsonl", [own])])
    assert name_family(found.models[0]) == expected


MODEL = Model(
    label="m", name="m", names=("m",), run="", weights="", step=None, earlier_steps=(), files=(),
    architecture="", gflops=None, provenance={},
)  # fmt: skip


class NoImages:
    def __len__(self) -> int:
        return 0


def details_of(names: tuple[str, ...]) -> Details:
    labels = torch.arange(4 * len(names)) % len(names)
    dataset = EvalDataset(
        name="d", class_names=names, templates=("{c}",), images=NoImages(), labels=labels,  # type: ignore[arg-type]
        captions=None, revision="0", tasks=("zero-shot",),
    )  # fmt: skip
    sure = torch.linspace(0.3, 0.9, len(labels))
    return prediction_details(dataset, labels.roll(1), task="fine-tune", setting="1 epochs", confidence=sure)


def page_of(details: Details) -> Page:
    return Page(f"<html>{blocks_html([Block(model=MODEL, details=details, score='')], Thumbnails())}</html>")


NAMES = st.text("abcdefgh<&", min_size=1, max_size=7)


@settings(max_examples=40)
@given(st.lists(NAMES, min_size=2, max_size=16, unique=True))
def test_columns_have_short_names_or_row_numbers(names: list[str]) -> None:
    page = page_of(details_of(tuple(names)))
    short = len(names) <= 12 and max(map(len, names)) <= 5
    numbers = [str(i + 1) for i in range(len(names))]
    text = "".join(page.text)
    first_row = names[0] if short else f"{names[0]} 1"
    assert "".join(names if short else numbers) + first_row in text
    for name, number in zip(names, numbers, strict=True):  # row numbers follow names, or are left out
        assert (f"{name} {number}" in text) or short


def test_unnamed_class_keeps_its_number() -> None:
    text = "".join(page_of(details_of(("", "two", "six"))).text)
    assert "123– 1two 2six 3" in text


def test_calibration_has_two_axes() -> None:
    details = details_of(("zero", "one"))
    page = page_of(details)
    assert "60.0% 1 accuracy 0 " in page.words
    assert " 0 confidence 1 " in page.words
    assert " accuracy 0 " not in page_of(replace(details, bins=())).words


def test_heading_has_singular_epoch() -> None:
    assert "fine-tune, 1 epoch" in page_of(details_of(("zero", "one"))).words
    assert "epochs" not in page_of(details_of(("zero", "one"))).words
    for setting in ("10 epochs", "0.1 epochs", "11 epochs", "4-shot logistic"):
        assert format_setting("fine-tune", setting) == setting
