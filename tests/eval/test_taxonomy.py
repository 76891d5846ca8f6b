"""Tests of accuracy per rank of a taxonomy."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from clipkit import CLIP
from clipkit.errors import DataError
from eval import evaluate
from eval.compare import compare
from eval.datasets.card import parse_card
from eval.datasets.dataset import EvalDataset
from eval.datasets.targets import find_targets
from eval.results.records import append_results, write_details
from eval.tasks import Options
from eval.tasks.classify import prompt_outcome
from eval.tasks.subject import Subject
from tests.eval.conftest import png

# the epithet alba is in two genera, and the genus Morus in two kingdoms
SPECIES = (
    "Animalia Aves Corvus corax",
    "Animalia Aves Corvus corone",
    "Animalia Aves Motacilla alba",
    "Animalia Aves Morus bassanus",
    "Plantae Rosales Morus alba",
    "Plantae Rosales Morus nigra subsp. x",
)
CARD = """
tasks = ["zero-shot"]
metric = "acc1"
further = ["acc1_*"]
taxonomy = ["kingdom", "order", "genus", "species"]
[prompts.own]
templates = ["a photo of {c}."]
"""


def write_species(folder: Path, card: str = CARD) -> Path:
    for seed, name in enumerate(SPECIES):
        for i in range(2):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / f"{i}.png").write_bytes(png(2 * seed + i))
    (folder / "card.toml").write_text(card)
    return folder


def taxonomic(folder: Path) -> EvalDataset:
    (target,) = find_targets([str(write_species(folder))])
    return target.dataset


@pytest.mark.parametrize("prompts", ["", "keys"])
def test_ranks_are_bound_to_class_keys(model: CLIP, tmp_path: Path, prompts: str) -> None:
    card = CARD
    if prompts:  # the names of prompts have no ranks
        listed = ", ".join(f'"{name}"' for name in reversed(SPECIES))
        card = CARD.replace("[prompts", f"keys = [{listed}]\n[prompts")
        card += "[prompts.own.names]\n" + "".join(f'"{name}" = "n{i}"\n' for i, name in enumerate(SPECIES))
    folder = write_species(tmp_path / "birds", card)
    (target,) = find_targets([str(folder)])
    dataset = target.dataset
    assert dataset.class_names[0] == ("n0" if prompts else SPECIES[0])
    assert list(dataset.taxonomy) == ["kingdom", "order", "genus", "species"]
    assert dataset.number_taxa("kingdom").tolist() == [0, 0, 0, 0, 1, 1]
    assert dataset.number_taxa("genus").tolist() == [0, 0, 1, 2, 3, 3]
    assert dataset.number_taxa("species").tolist() == list(range(6))
    assert dataset.taxonomy["species"][5].endswith("\nnigra subsp. x")
    scores = {score.metric: score for score in evaluate(model, str(folder))}
    ranks = ("kingdom", "order", "genus", "species")
    values = [scores[f"acc1_{rank}"].value for rank in ranks]
    assert values == sorted(values, reverse=True) and values[-1] == scores["acc1"].value
    assert [scores[f"acc1_{rank}"].chance for rank in ranks] == pytest.approx(
        [(4 * 4 + 2 * 2) / 36, (4 * 4 + 2 * 2) / 36, (2 * 2 + 1 + 1 + 2 * 2) / 36, 1 / 6]
    )


def test_accuracy_of_a_rank_by_hand_and_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.results.details._draw_thumbnails", lambda *_: {})
    data = taxonomic(tmp_path / "birds")
    predictions = {
        "first": [1, 0, 0, 0, 2, 4, 3, 5, 3, 5, 5, 0],  # of two images of each species
        "second": [1, 0, 0, 1, 2, 2, 3, 3, 3, 4, 5, 5],
    }
    results = tmp_path / "results.jsonl"
    found: dict[str, dict[str, float]] = {}
    for model, classes in predictions.items():
        images = torch.eye(6)[torch.tensor(classes)]
        metrics = ("acc1", "acc1_*")
        subject = SimpleNamespace(dataset=data, metrics=metrics, device=torch.device("cpu"))
        outcome = prompt_outcome(cast(Subject, subject), Options(), images, torch.eye(6), 20.0)
        found[model] = {score.metric: score.value for score in outcome.scores}
        append_results(results, outcome.scores, step=None, provenance={"model": model, "weights": model})
        for details in outcome.details:
            write_details(results, details, weights=model)
    labels = torch.arange(6).repeat_interleave(2).tolist()
    lineages = [name.split(" ", 3) for name in SPECIES]
    differences = {one.metric: one for one in compare([results], "first", "second").differences}
    for depth, rank in enumerate(("kingdom", "order", "genus", "species"), 1):
        for model, classes in predictions.items():
            right = [lineages[p][:depth] == lineages[t][:depth] for p, t in zip(classes, labels, strict=True)]
            assert found[model][f"acc1_{rank}"] == pytest.approx(sum(right) / 12)
        metric = f"acc1_{rank}"
        change = found["second"][metric] - found["first"][metric]
        assert differences[metric].test.difference == pytest.approx(change)
    assert [12 * found["first"][f"acc1_{rank}"] for rank in ("kingdom", "genus", "species")] == [8, 8, 4]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"acc1_*"', '"acc1_family"', "'acc1_family' does not apply to zero-shot; metrics that do: .*acc1_genus"),
        ('["kingdom", ', '["id", "domain", "kingdom", ', "has 4 parts, but taxonomy has 6 ranks"),
        ("taxonomy =", 'taxonomy_separator = ","\ntaxonomy =', "has 1 part, but taxonomy has 4 ranks"),
        ('taxonomy = ["kingdom", "order", "genus", "species"]', "", r"'acc1_\*' does not apply to zero-shot"),
        ('"genus", "species"', '"genus", "genus"', "taxonomy has 'genus' several times"),
    ],
)  # fmt: skip
def test_mistakes_in_a_taxonomy_are_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    folder = write_species(tmp_path / "birds", CARD.replace(old, new, 1))
    with pytest.raises(DataError, match=message) as error:
        find_targets([str(folder)])
    assert "\n" not in str(error.value)


def test_folders_with_underscores_have_ranks_and_numbers_have_none(tmp_path: Path) -> None:
    folder = write_species(tmp_path / "birds")
    for path in [path for path in folder.iterdir() if path.is_dir()]:
        path.rename(folder / f"0001_{path.name.replace(' ', '_')}")
    card = CARD.replace('["kingdom"', '["id", "kingdom"')
    (folder / "card.toml").write_text(card)
    (target,) = find_targets([str(folder)])
    assert target.dataset.number_taxa("genus").tolist() == [0, 0, 1, 2, 3, 3]
    numbered = parse_card(
        CARD.replace("taxonomy =", 'keys = ["0", "1"]\ntaxonomy ='), name="a", file="card.toml"
    )
    with pytest.raises(DataError, match="class '0' has 1 part, but taxonomy has 4 ranks"):
        numbered.list_taxonomy(())


def test_missing_ranks_are_refused_and_spaces_do_not_count(tmp_path: Path) -> None:
    ranks = 'taxonomy = ["kingdom", "genus", "species"]\ntaxonomy_separator = ","'
    card = CARD.replace('taxonomy = ["kingdom", "order", "genus", "species"]', ranks)
    parsed = parse_card(card, name="birds", file="card.toml")
    with pytest.raises(DataError, match="class 'A,,c' has no genus"):
        parsed.list_taxonomy(["A,,c", "A,b,d"])
    genus = parsed.list_taxonomy(["A, b, c", "A,b,d"])["genus"]
    assert genus[0] == genus[1]
