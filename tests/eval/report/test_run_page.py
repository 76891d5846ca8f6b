"""Tests of a run's page: well-formed and self-contained with missing, damaged and hostile files."""

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from clipkit.errors import DataError
from eval.report import build_report
from eval.report.charts import ChartLine, draw_chart
from eval.results.records import Example, Guess, Hit, Matrix, Query, Snapshot, Thumbnail, write_snapshot
from tests.eval.made_up_results import EVIL, PNG
from tests.eval.web_page import Page

CONFIG = (
    'steps = 300\n[model]\nname = "ViT-Ti-4-32"\n[eval]\ndata = ["digits", "glyphs"]\nevery_steps = 100\n'
)


def snapshot(step: int, *, dataset: str = "digits", words: str = "a photo of a digit") -> Snapshot:
    guesses = tuple(Guess(label=f"{words} {i}", probability=0.5 / (i + 1), right=i == 1) for i in range(5))
    example = Example(picture="4", guesses=guesses, truth=f"{words} 1", rank=2, probability=0.25)
    missed = Example(picture="5", guesses=guesses[2:], truth="far", rank=9, probability=0.0001)
    matrix = Matrix(pictures=("4", "5"), captions=(words, "other"), cosines=((0.5, -0.1), (0.0, 0.3)))
    hits = tuple(
        Hit(picture=name, cosine=0.25, right=right)
        for name, right in (("4", True), ("5", False), ("9", None))
    )
    return Snapshot(
        step=step,
        dataset=dataset,
        samples=10,
        classes=10,
        examples=(example, missed),
        matrix=matrix,
        queries=(Query(text=words, hits=hits),),
        pictures={"4": Thumbnail(png=PNG, alt=words), "5": Thumbnail(png="", alt="does not decode")},
    )


def metrics_line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 / (1 + step / 50),
        "chance": math.log(256),
        "samples_per_second": 800.0 + step % 7,
        "data_time": 0.016,
        "batch_time": 0.32,
        "scale": 14.3 + step / 10,
        "lr": 1e-4,
        "seconds": step / 2,
        "samples": step * 256,
    }


def result_line(
    step: int, dataset: str = "digits", metric: str = "acc1", value: float = 0.612
) -> dict[str, Any]:
    scores = {"value": value, "n": 1797, "low": value - 0.02, "high": value + 0.02, "chance": 0.1}
    return {
        "step": step,
        "dataset": dataset,
        "task": "zero-shot",
        "metric": metric,
        **scores,
        "torch": "2.15.0",
    }


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "quickstart"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG)
    write_lines(run / "metrics.jsonl", [metrics_line(step) for step in range(1, 301)])
    rows = [
        result_line(step, dataset, metric)
        for step in (100, 200, 300)
        for dataset in ("digits", "glyphs")
        for metric in ("acc1", "acc5")
    ]
    write_lines(run / "results.jsonl", rows)
    for step in (100, 200, 300):
        write_snapshot(run, snapshot(step))
    return run


def parse(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_floor_is_drawn_beside_chance(run: Path) -> None:
    lines = [metrics_line(step) | {"floor": 2.5 + step / 1000} for step in range(1, 101)]
    write_lines(run / "metrics.jsonl", lines)
    assert "floor, entropy of the targets, 2.55" in parse(build_report(run)).words


def test_page_summarizes_the_run(run: Path) -> None:
    page = parse(build_report(run))
    assert "trained for 300 steps on 76,800 samples in 2.5 minutes" in page.words
    assert "61.2 %" in page.words
    assert "95% interval 59.2% to 63.2%" in page.words
    assert "chance, ln 256 = 5.55" in page.words
    assert "cap 100" in page.words
    assert "rank 2 of 10" in page.words
    assert "1 of 2 images are nearest" not in page.words
    assert "2 of 2 images are nearest to their own caption" in page.words
    assert "step 100 1 of 2" in page.words
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert ids == ["curves", "examples", "similarity", "queries", "results", "about"]
    assert not any(attributes.get("class") == "notes" for _, attributes in page.tags)


def test_architecture_is_that_of_the_scores_if_the_config_names_none(run: Path) -> None:
    (run / "config.toml").write_text('[model]\nname = ""\n')
    assert "A model trained for 300 steps" in parse(build_report(run)).words
    write_lines(run / "results.jsonl", [result_line(300) | {"architecture": "ViT-Ti-4-16"}])
    assert "ViT-Ti-4-16 trained for 300 steps" in parse(build_report(run)).words


def test_page_loads_nothing_external(run: Path) -> None:
    html = build_report(run).read_text()
    page = Page(html)
    assert "http:" not in html
    assert "https:" not in html
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")  # type: ignore[union-attr]
    assert set(re.findall(r"url\((.{15})", html)) == {"data:image/png;"}
    assert "@import" not in html


def test_security_policy_allows_only_the_pages_own_script(run: Path) -> None:
    page = parse(build_report(run))
    (policy,) = (str(a["content"]) for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256("".join(page.scripts).encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_images_have_alternative_text_and_are_embedded_once(run: Path) -> None:
    html = build_report(run).read_text()
    page = Page(html)
    images = [a for tag, a in page.tags if tag == "i" and "pic" in str(a.get("class")).split()]
    assert len(images) > 10
    assert all(a.get("role") == "img" and a.get("aria-label") for a in images)
    assert html.count(PNG) == 1
    plots = [a for _, a in page.tags if a.get("class") == "plot"]
    assert len(plots) == 7
    assert all(a.get("aria-label") for a in plots)


def test_text_from_data_is_escaped(tmp_path: Path) -> None:
    run = tmp_path / "a<b>&"
    run.mkdir()
    (run / "config.toml").write_text(f"# {EVIL}\nsteps = 3\n[model]\nname = '''{EVIL}'''\n")
    write_lines(run / "metrics.jsonl", [metrics_line(1)])
    line = {**result_line(1, EVIL, EVIL), "task": EVIL, "weights": EVIL, EVIL: {EVIL: [EVIL]}}
    write_lines(run / "results.jsonl", [line])
    write_lines(run / "bad_samples.jsonl", [{"shard": EVIL, "key": EVIL, "cause": EVIL}])
    evil = snapshot(1, dataset=EVIL, words=EVIL)
    css = Thumbnail(png="AAAA)}</style><script>alert(1)</script>", alt=EVIL)
    write_snapshot(run, Snapshot(**{**vars(evil), "pictures": {**evil.pictures, "9": css}}))
    html = build_report(run).read_text()
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not any(tag == "img" for tag, _ in page.tags)
    assert "alert(" not in "".join(page.scripts)
    assert html.count("</style>") == 1
    assert EVIL in "".join(page.text)


@pytest.mark.parametrize("missing", ["config.toml", "metrics.jsonl", "results.jsonl", "snapshots"])
def test_a_missing_file_is_noted(run: Path, missing: str) -> None:
    (run / missing).rename(run / "elsewhere")
    page = parse(build_report(run))
    assert (
        "There are no snapshots" in page.words
        if missing == "snapshots"
        else f"{missing} is missing" in page.words
    )


@pytest.mark.parametrize(
    ("config", "last_step", "said"),
    [
        (CONFIG.replace('"digits", "glyphs"', ""), 300, "This run has no scores"),
        ("steps = 300\n", 300, "python -m eval retrieval --model RUN --data FOLDER"),
        ('eval = 1\nsteps = "many"\n', 300, "eval.data=FOLDER"),
        (CONFIG, 99, "No scores yet: digits, glyphs, first at step 100."),
        (CONFIG.replace("every_steps = 100", "every_steps = 0"), 299, "glyphs, first at step 300."),
    ],
)
def test_scores_that_are_not_due_are_not_noted_as_missing(
    run: Path, config: str, last_step: int, said: str
) -> None:
    (run / "results.jsonl").unlink()
    (run / "snapshots").rename(run / "elsewhere")
    (run / "config.toml").write_text(config)
    write_lines(run / "metrics.jsonl", [metrics_line(step) for step in range(1, last_step + 1)])
    page = parse(build_report(run))
    assert said in page.words
    assert not any(attributes.get("class") == "notes" for _, attributes in page.tags)


def test_a_score_has_the_same_digits_everywhere(run: Path) -> None:
    lines = [
        result_line(step, metric=metric, value=0.00284) for step in (100, 300) for metric in ("acc1", "acc5")
    ]
    write_lines(run / "results.jsonl", [{**line, "low": 0.001, "chance": 0.00161} for line in lines])
    page = parse(build_report(run))
    assert "0.28 %" in page.words
    assert "top-1 0.28%" in page.words
    assert "chance 0.16%" in page.words
    said = next(str(a["aria-label"]) for _, a in page.tags if str(a.get("aria-label")).startswith("digits"))
    assert "top-1 from 0.28% at step 100 to 0.28% at step 300" in said
    assert not re.search(r"0\.284|0\.3%|0\.161%", page.words + said)


def test_a_long_label_is_complete_in_its_tooltip(run: Path) -> None:
    words = "latin capital letter e with circumflex and tilde " * 3
    write_snapshot(run, snapshot(300, words=words))
    page = parse(build_report(run))
    labels = [str(attributes["title"]) for _, attributes in page.tags if attributes.get("class") == "label"]
    assert f"{words} 4" in labels


@pytest.mark.parametrize("kept", ["config.toml", "metrics.jsonl", "results.jsonl", "snapshots"])
def test_page_is_built_from_one_part_alone(run: Path, kept: str) -> None:
    for path in list(run.iterdir()):
        if path.name != kept:
            path.rename(run.parent / path.name)
    parse(build_report(run))


def test_lines_cut_short_are_skipped(run: Path) -> None:
    for name in ("metrics.jsonl", "results.jsonl"):
        text = (run / name).read_text()
        (run / name).write_text(text[:-25])
    (run / "snapshots" / "step_00000300.digits.json").write_text('{"step": 300, "da')
    page = parse(build_report(run))
    assert "metrics.jsonl: one line cut short or broken, and left out." in page.words
    assert "results.jsonl: one line cut short or broken, and left out." in page.words
    assert "snapshots/step_00000300.digits.json cannot be read" in page.words
    assert "trained for 300 steps" in page.words  # the step is known from the scores


def test_odd_values_do_not_break_the_page(run: Path) -> None:
    lines: list[Any] = [
        {"step": 1, "loss": float("nan"), "lr": float("inf"), "chance": 1e9},
        {"step": "2", "loss": 1.0},
        {"step": 3, "loss": "low", "scale": None, "samples": True},
        {"loss": 1.0},
    ]
    write_lines(run / "metrics.jsonl", lines)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"[1]\nnull\n\xff\xfe\n\n" + b"9" * 5000 + b"\n")
    write_lines(
        run / "results.jsonl", [{"step": None}, result_line(3, value=250.0), result_line(4, "\ud800", "r@1")]
    )
    (run / "config.toml").write_text("steps = = 3")
    page = parse(build_report(run))
    assert "Some values of loss, lr are not finite" in page.words
    assert "config.toml is not valid TOML" in page.words
    assert "250" in page.words


@settings(max_examples=25)
@given(st.lists(st.floats(1e-3, 5), min_size=1, max_size=150))
def test_device_utilization_above_its_peak_is_not_shown(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float]
) -> None:
    run = tmp_path_factory.mktemp("busy") / "run"
    run.mkdir()
    write_lines(run / "metrics.jsonl", [{"step": i, "mfu": share} for i, share in enumerate(shares, start=1)])
    page = parse(build_report(run))
    (plot,) = (a for _, a in page.tags if a.get("class") == "plot")
    (drawn,) = json.loads(str(plot["data-chart"]))["lines"]
    beaten = max(shares) > 1
    assert max(drawn["y"]) <= 100.1
    if len(shares) < 100:  # not smoothed
        largest = 100 if beaten else 100 * max(shares)
        assert max(drawn["y"]) == pytest.approx(largest, rel=1e-3)
    assert ("faster than the peak measured at the start" in page.words) == beaten
    assert ("Device utilization (MFU) median" in page.words) != beaten
    assert ("% of the fastest step" in page.words) == beaten


def test_a_repeated_step_counts_once(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**metrics_line(300), "loss": 0.123}) + "\n")
    assert "last loss is 0.123" in parse(build_report(run)).words


def test_loss_terms_have_curves_and_loss_time_has_none(run: Path) -> None:
    lines = [metrics_line(step) | {"loss_caption": 2.5, "loss_time": 0.01} for step in range(1, 9)]
    write_lines(run / "metrics.jsonl", lines)
    text = build_report(run).read_text(encoding="utf-8")
    assert "Caption loss" in text and "Time loss" not in text and "highest logged" in text


def test_at_most_five_snapshots_are_shown(run: Path) -> None:
    for step in range(400, 2001, 100):
        write_snapshot(run, snapshot(step))
    shown = re.findall(r"<h5>step ([\d,]+)", build_report(run).read_text())
    assert len(shown) == 5
    assert (shown[0], shown[-1]) == ("100", "2,000")


def test_bad_samples_are_counted(run: Path) -> None:
    for rank in range(2):
        lines = [{"step": 1, "shard": "0.tar", "key": f"k{i}", "cause": "cut short"} for i in range(700)]
        write_lines(run / f"bad_samples.rank{rank}.jsonl", lines)
    page = parse(build_report(run))
    assert "1,400 samples could not be used" in page.words
    assert page.words.count("cut short") == 5


def test_same_folder_gives_same_bytes(run: Path, tmp_path: Path) -> None:
    first = build_report(run).read_bytes()
    assert build_report(run, tmp_path / "deep" / "page.html").read_bytes() == first
    assert build_report(run).read_bytes() == first
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]
    longest = tmp_path / ("p" * 250 + ".html")  # 255 bytes
    assert build_report(run, longest).read_bytes() == first
    assert not list(run.glob(".*"))


def test_missing_run_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder at"):
        build_report(tmp_path / "nothing")
    with pytest.raises(DataError, match="is not a run folder"):
        build_report(tmp_path)


def test_page_of_a_long_run_is_small(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [metrics_line(step) for step in range(20_000)])
    assert build_report(run).stat().st_size < 400_000


_NUMBERS = st.floats(-1e12, 1e12, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 10**9), _NUMBERS), max_size=30, unique_by=lambda point: point[0]))
def test_any_curve_is_drawn_inside_its_frame(points: list[tuple[int, float]]) -> None:
    points.sort()
    html = draw_chart("t", [ChartLine(name="n", points=points, dots=True)], floor=0)
    assert bool(html) == bool(points)
    Page(html)
    for pair in re.findall(r'points="([^"]*)"', html):
        for coordinate in re.split("[ ,]", pair):
            assert -0.1 <= float(coordinate) <= 1000.1
    for place in re.findall(r"(?:left|top):([^%;]*)%", html):
        assert -0.1 <= float(place) <= 100.1


@pytest.mark.parametrize(
    "value",
    ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "9" * 299, "9" * 400, "9" * 5000, "1e999", "NaN"],
)
def test_hostile_numbers_and_nesting_affect_only_their_line(run: Path, value: str) -> None:
    for name in ("metrics.jsonl", "results.jsonl", "bad_samples.jsonl"):
        line = json.dumps({**metrics_line(400), **result_line(400), "loss": 0})
        for key in ("step", "loss", "value", "n", "low", "shard", "torch"):
            with (run / name).open("a") as file:
                file.write(re.sub(rf'("{key}": )[^,}}]+', rf"\g<1>{value}", line) + "\n")
    Page(build_report(run).read_text())


def test_hostile_configs_are_shown_unchanged(run: Path) -> None:
    for text in ("a = " + "[" * 100_000, f"steps = {'9' * 400}", f"steps = {'9' * 5000}"):
        (run / "config.toml").write_text(text)
        assert text in Page(build_report(run).read_text()).words


def test_an_unwritable_page_is_a_one_line_error(run: Path) -> None:
    with pytest.raises(DataError, match=r"^cannot write .*: Is a directory$"):
        build_report(run, run)
    assert not list(run.parent.glob(".*.partial"))
    with pytest.raises(DataError, match=r"cannot read the run folder xxx.*: File name too long"):
        build_report(Path("x" * 5000))
