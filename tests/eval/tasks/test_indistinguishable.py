"""Tests of texts with the same tokens: reported in one line, without changes of scores."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eval as evaluation
from clipkit import CLIP
from clipkit.config import Config
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval.__main__ import main
from eval.datasets.card import load_card
from eval.datasets.dataset import EvalDataset
from eval.features.encoder import Encoder, Ranks
from eval.readers import open_dataset
from eval.tasks.classify import report_captions, report_choices, report_classes
from eval.tasks.subject import Subject
from tests.eval.conftest import CLASSES

WriteDataset = Callable[..., Path]
LONG = "word " * 100


def reported(model: CLIP, dataset: EvalDataset, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of scoring a dataset on its own tasks."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "eval"):
        evaluation.evaluate(model, dataset)
    return [record.getMessage() for record in caplog.records]


def test_classes_with_the_same_tokens_are_reported_once(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["red", "green", "Red", "blue", " GREEN", "white", "red"]
    dataset = replace(
        open_dataset(write_dataset(class_names=CLASSES)), name="spellings", class_names=tuple(names)
    )
    assert dataset.labels is not None
    affected = sum(label in (0, 1, 2, 4, 6) for label in dataset.labels.tolist())
    message = (
        f"dataset spellings: {affected} of 23 images have a label that the model cannot tell from another, "
        "because all prompts of these classes have the same tokens: 'red' (0) = 'Red' (2) = 'red' (6), "
        "'green' (1) = ' GREEN' (4)"
    )
    assert reported(model, dataset, caplog) == [message]
    assert reported(model, dataset, caplog) == []  # as in the next evaluation of a training
    assert reported(model, replace(dataset, name="plain", class_names=CLASSES), caplog) == []


def test_scores_of_repeated_names_stay_comparable(model: CLIP, write_dataset: WriteDataset) -> None:
    names = ("red", "green", "red", *CLASSES[3:])
    dataset = replace(open_dataset(write_dataset()), class_names=names)
    subject = Subject(Encoder(model), dataset)
    predicted = (subject.images().projected @ subject.class_weights()).argmax(dim=1)
    assert dataset.labels is not None
    by_metric = {score.metric: score for score in evaluation.evaluate(subject)}
    assert by_metric["acc1"].value == (predicted == dataset.labels).double().mean()
    assert by_metric["acc1"].chance == 1 / 7


def test_images_of_several_labels_are_counted_once(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    labels = torch.tensor([[True, False, True], [False, True, False], [True, True, False]])
    dataset = open_dataset(write_dataset(labels=[0, 1, 2], class_names=["a", "b", "c"]))
    several = replace(dataset, name="several", labels=labels, class_names=("a", "b", "A"))
    with caplog.at_level(logging.WARNING, "eval"):
        report_classes(Subject(Encoder(model), several))
    assert "dataset several: 2 of 3 images have a label" in caplog.text


def test_only_rank_0_reports(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = replace(open_dataset(write_dataset()), name="ranked", class_names=("a", "A", *CLASSES[2:]))
    for rank, count in ((1, 0), (0, 1)):
        caplog.clear()
        ranks = Ranks(rank=rank, world=2, gather=lambda values: values)
        with caplog.at_level(logging.WARNING, "eval"):
            report_classes(Subject(Encoder(model, ranks=ranks), dataset))
        assert len(caplog.records) == count


@pytest.mark.parametrize("prompts", ["openai", "simple"])
def test_repeated_names_of_imagenet_are_reported(
    prompts: str, model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    card = load_card("imagenet1k")
    found = card.prompts(prompts, card.keys)
    dataset = replace(
        open_dataset(write_dataset()),
        name=f"imagenet-{prompts}",
        class_names=tuple(own[0] for own in found.class_names),
        templates=found.templates,
        labels=torch.tensor([657, 744, 836, 837, *range(19)]),
    )
    with caplog.at_level(logging.WARNING, "eval"):
        report_classes(Subject(Encoder(model), dataset))
    assert caplog.records[0].getMessage() == (
        f"dataset imagenet-{prompts}: 4 of 23 images have a label that the model cannot tell from another, because "
        "all prompts of these classes have the same tokens: 'missile' (657) = 'missile' (744), "
        "'sunglasses' (836) = 'sunglasses' (837)"
    )


def test_captions_with_the_same_tokens_are_reported(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    captions = [f"image {i}" for i in range(19)] + ["Image 3", "image  3", f"{LONG} cat", f"{LONG} dog"]
    dataset = replace(
        open_dataset(write_dataset(captions=captions)), name="captions", tasks=("retrieval",), labels=None
    )
    message = (
        "dataset captions: 5 of 23 distinct captions have the same tokens as a caption of another image, so "
        "the model cannot tell them apart: 'image 3', 'Image 3', 'image  3' and 2 more"
    )
    assert reported(model, dataset, caplog) == [message]
    own = tuple((f"image {i}", f"Image {i}") for i in range(23))  # both captions belong to the same image
    with caplog.at_level(logging.WARNING, "eval"):
        caplog.clear()
        report_captions(Subject(Encoder(model), replace(dataset, captions=own)))
        report_captions(Subject(Encoder(model), replace(dataset, captions=None)))
    assert not caplog.records


def test_choices_with_the_same_tokens_are_reported(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    choices = (
        ("a cat", "A Cat"),
        (f"{LONG} cat", "x", f"{LONG} dog"),
        ("a", "b"),
        ("a", "a"),
        ("b", "c", "C"),
    )
    dataset = open_dataset(write_dataset(labels=[0, 1, 2, 3, 4]))
    chosen = replace(dataset, name="choices", choices=choices, tasks=("compositional",))
    message = (
        "dataset choices: 2 of 5 images have a right caption with the same tokens as a wrong one, so the model "
        f"cannot tell them apart: 'a cat', {LONG[:60]!r}"
    )
    assert reported(model, chosen, caplog) == [message]
    with caplog.at_level(logging.WARNING, "eval"):
        caplog.clear()
        report_choices(Subject(Encoder(model), replace(chosen, choices=None)))
    assert not caplog.records


def test_zero_shot_command_reports_and_scores(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(run, model, optimizer, LoopState(step=40, data="none"), Config(), keep=1)
    data = write_dataset("command", class_names=["red", "green", "RED", "blue", "black", "white", "grey"])
    with caplog.at_level(logging.WARNING, "eval"):
        assert main(["zero-shot", "--model", str(run), "--data", str(data)]) == 0
    assert "dataset command: 7 of 23 images have a label" in caplog.text
    assert len((run / "results.jsonl").read_text().splitlines()) == 4
