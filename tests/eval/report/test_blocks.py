"""Tests of a model's details on one dataset: confusion matrix, calibration and headings."""

from dataclasses import replace

import torch
from hypothesis import given, settings, strategies as st

from eval.datasets.dataset import EvalDataset
from eval.report.charts import Thumbnails
from eval.report.comparison_page import Block, blocks_html
from eval.report.tables import format_setting
from eval.results.details import prediction_details
from eval.results.records import Details
from eval.results.table import Model
from tests.eval.web_page import Page

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
