"""Tests of caption prompts: chosen by --prompts, recorded in results, separate from class prompts."""

import copy
import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import eval as evaluation
from clipkit import CLIP
from clipkit.config import Config
from clipkit.errors import ConfigError
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval import read_results
from eval.__main__ import main
from eval.compare import compare
from eval.datasets.card import load_card
from eval.datasets.catalog import describe_card
from eval.datasets.targets import find_targets
from eval.report import as_csv
from eval.report.command import list_published
from eval.report.tables import score_table
from eval.results.records import read_details
from eval.results.table import read_table
from eval.verify import list_expected_scores, open_expected_datasets
from tests.eval.made_up_results import line, write

WriteDataset = Callable[..., Path]
CAPTIONS = [f"thing {i}\nsome {{c}} {i % 3}" for i in range(12)]  # captions may contain {c} themselves
CARD = """
tasks = ["retrieval", "zero-shot"]
metric = "mean_R@1"
keys = ["red", "green", "blue", "yellow", "black", "white", "grey"]

[prompts.first]
templates = ["{c}"]

[prompts.openai]
templates = ["an image in {c}."]

[caption_prompts]
openai = "a photo of {c}"
mine = "{c}, {c}"
"""


@pytest.fixture
def folder(write_dataset: WriteDataset) -> Path:
    """Images with labels and captions, and a card with prompts for both."""
    folder = write_dataset("both", labels=[i % 7 for i in range(12)], captions=CAPTIONS)
    (folder / "card.toml").write_text(CARD)
    return folder


@pytest.fixture
def run(model: CLIP, tmp_path: Path) -> Path:
    """A run folder with one checkpoint."""
    state = LoopState(step=40, data="none")
    save_checkpoint(tmp_path / "run", model, torch.optim.AdamW(model.parameters()), state, Config(), keep=1)
    return tmp_path / "run"


def test_prompt_equals_captions_that_contain_it(
    model: CLIP, folder: Path, write_dataset: WriteDataset
) -> None:
    written = {
        "": CAPTIONS,
        "openai": ["\n".join(f"a photo of {one}" for one in own.split("\n")) for own in CAPTIONS],
        "mine": ["\n".join(f"{one}, {one}" for one in own.split("\n")) for own in CAPTIONS],
    }
    prints = set()
    for prompts, captions in written.items():
        (target,) = find_targets([str(folder)], prompts=prompts)
        assert target.dataset.caption_prompt_set == prompts
        assert target.dataset.captions == tuple(tuple(own.split("\n")) for own in CAPTIONS)
        plain = evaluation.open_dataset(
            write_dataset(f"plain {prompts}", labels=[None] * 12, captions=captions, class_names=None)
        )
        scores, expected = (
            evaluation.evaluate(model, one, tasks=["retrieval"]) for one in (target.dataset, plain)
        )
        assert [(score.metric, score.value) for score in scores] == [
            (one.metric, one.value) for one in expected
        ]
        assert {score.prompt_set for score in scores} == {prompts}
        facts = [evaluation.provenance(model, one, weights="")["captions"] for one in (target.dataset, plain)]
        assert facts[0] == facts[1]
        prints.add(facts[0])
    assert len(prints) == 3


def test_classes_and_captions_have_separate_prompts(folder: Path) -> None:
    found = {}
    for prompts in ("", "first", "openai", "mine", "simple"):
        (target,) = find_targets([str(folder)], prompts=prompts)
        data = target.dataset
        found[prompts] = (data.prompt_set, data.templates, data.caption_prompt_set, data.caption_template)
    assert found == {
        "": ("first", ("{c}",), "", "{c}"),
        "first": ("first", ("{c}",), "", "{c}"),
        "openai": ("openai", ("an image in {c}.",), "openai", "a photo of {c}"),
        "mine": ("first", ("{c}",), "mine", "{c}, {c}"),
        "simple": ("simple", ("a photo of a {c}.",), "", "{c}"),
    }


def test_lines_details_and_pages_distinguish_prompts(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    arguments = ["run", "--model", str(run), "--data", str(folder), "--out", str(out), "--skip-existing"]
    arguments += ["--task", "zero-shot", "--task", "retrieval"]

    def scored(*more: str) -> set[tuple[str, str]]:
        before = len(read_results(out))
        assert main([*arguments, *more]) == 0
        return {(result["task"], result["prompt_set"]) for result in read_results(out)[before:]}

    assert scored() == {("zero-shot", "first"), ("retrieval", "")}
    assert scored("--prompts", "openai") == {("zero-shot", "openai"), ("retrieval", "openai")}
    assert scored("--prompts", "mine") == {("retrieval", "mine")}  # prompts of classes are unchanged
    assert scored("--prompts", "openai") == scored() == set()
    of_retrieval = [result for result in read_results(out) if result["task"] == "retrieval"]
    for key in ("captions", "inputs"):
        assert len({one[key] for one in of_retrieval}) == 3
    details = [detail for detail in read_details(out)[0] if detail.task == "retrieval"]
    assert {detail.prompt_set for detail in details} == {"", "openai", "mine"}
    assert main(["report", str(out), "--markdown", "-"]) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| both")]
    assert [row[0] for row in rows if row[2] == "mean R@1"] == [
        "| both (retrieval)", "| both (retrieval, prompts openai)", "| both (retrieval, prompts mine)",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no dataset has this prompt set .*mine, openai"):
        main([*arguments, "--prompts", "nobody's"])


def test_different_prompts_with_one_name_are_not_compared(
    model: CLIP, run: Path, folder: Path, tmp_path: Path
) -> None:
    results, card = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], (folder / "card.toml").read_text()
    other = tmp_path / "other"
    state = LoopState(step=40, data="none")
    with torch.no_grad():
        changed = copy.deepcopy(model)
        changed.logit_scale.add_(0.1)
    save_checkpoint(other, changed, torch.optim.AdamW(changed.parameters()), state, Config(), keep=1)
    texts = card, card.replace("a photo", "photos")
    for source, out, text in zip((run, other), results, texts, strict=True):
        (folder / "card.toml").write_text(text)
        for prompts in ("", "openai"):
            arguments = ["retrieval", "--model", str(source), "--data", str(folder), "--out", str(out)]
            assert main([*arguments, "--prompts", prompts]) == 0
    found = compare([], *map(str, results))
    assert {difference.prompt_set for difference in found.differences} == {""}
    (why,) = (one for one in found.refused if "differ" in one)
    assert why.startswith("retrieval on both: the captions of set openai differ (")
    (note,) = read_table(results).notes
    assert note.startswith("Not all models were scored with the same prompts on both (revisions ")


def test_expected_scores_belong_to_their_caption_prompts(folder: Path) -> None:
    known = "".join(
        f'\n[[expected]]\ntask = "{task}"\nmetric = "{metric}"\nprompts = "{prompts}"\ntolerance = 0.1\n'
        f'source = "x"\nvalues = {{ "m" = {value} }}\n'
        for task, metric, prompts, value in (
            ("retrieval", "mean_R@1", "openai", 0.1),
            ("retrieval", "mean_R@1", "", 0.2),
            ("zero-shot", "acc1", "openai", 0.3),
        )
    )
    (folder / "card.toml").write_text(CARD + known)
    found = open_expected_datasets([str(folder)], "m", root=None)
    told = [
        (target.dataset.caption_prompt_set, [each.value for each in list_expected_scores(target, "m")])
        for target in found.targets
    ]
    assert told == [("openai", [0.1, 0.3]), ("", [0.2])]


def test_published_scores_belong_to_their_caption_prompts(tmp_path: Path) -> None:
    name = "open_clip:ViT-L-14-336/openai"
    lines = [
        line(4, "flickr30k", metric, 0.5, prompt_set=prompts, task="retrieval", n=1000)
        for prompts in ("openai", "")
        for metric in ("mean_R@1", "image_to_text_R@1", "text_to_image_R@1", "image_to_text_R@5")
    ]
    path = write(tmp_path / "r.jsonl", lines)
    published = list_published([load_card("flickr30k")])
    table = score_table(read_table([path]), published=published, primary={"flickr30k": "mean_R@1"})
    assert table.published[:1] == (name,)
    beside = {(one.note, one.metric): one.published.get(name) for one in table.lines}
    assert beside == {
        ("prompts openai", "mean_R@1"): None,
        ("prompts openai", "image_to_text_R@1"): 0.88,
        ("prompts openai", "text_to_image_R@1"): 0.687,
        ("", "mean_R@1"): 0.773,
        ("", "image_to_text_R@1"): 0.877,
        ("", "text_to_image_R@1"): 0.669,
    }
    rows = csv.DictReader(io.StringIO(as_csv([path], published=published, primary={"flickr30k": "mean_R@1"})))
    others = {
        (row["prompt_set"], row["metric"]): float(row["value"])
        for row in rows
        if row["kind"] == "published" and row["model"] == name
    }
    assert others == {
        ("openai" if note else "", metric): value for (note, metric), value in beside.items() if value
    }


def test_new_card_explains_caption_prompts(folder: Path, write_dataset: WriteDataset) -> None:
    (folder / "card.toml").unlink()
    (folder / "dataset_type.txt").write_text("retrieval\n")  # although its images have labels
    for own, asked in ((folder, True), (write_dataset(), False)):
        assert main(["new", "Mine", "--data", str(own)]) == 0
        text = (own / "card.toml").read_text()
        assert ("[caption_prompts]" in text) == asked
        (own / "card.toml").write_text(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE))
        (target,) = find_targets([str(own)], prompts="NAME")
        assert target.dataset.caption_template == ("a photo of {c}" if asked else "{c}")
        assert [
            expected_score.value
            for expected_score in list_expected_scores(find_targets([str(own)])[0], "MODEL")
        ] == [0.5]


def test_cards_have_caption_prompt_of_the_paper() -> None:
    for name in ("flickr30k", "mscoco_captions", "flickr8k"):
        assert load_card(name).caption_prompts == {"openai": "a photo of {c}"}
        (told,) = (one.split(None, 1)[1] for one in describe_card(name) if one.split()[0] == "prompts")
        assert told == "openai (of captions: 'a photo of {c}')"
        of_paper = [one for one in load_card(name).published if one.source.startswith("CLIP paper")]
        assert {one.prompts for one in of_paper} == ({"openai"} if of_paper else set())
        assert not any(one.prompts for one in load_card(name).expected)
