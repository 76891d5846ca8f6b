"""Tests of encoding, zero-shot and retrieval on small datasets, against plain loops and open_clip."""

import copy
import io
import json
import math
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import clipkit
import eval as evaluation
from clipkit import CLIP
from clipkit.errors import ConfigError, DataError
from clipkit.model.clip import create
from clipkit.model.zero_shot import attach_class_head
from data.options import PackOptions
from data.pack import pack
from data.shards.writer import DatasetWriter, Record
from eval import Encoder, Ranks, Subject
from eval.features.encoder import dtype_name
from eval.metrics.intervals import evaluate_statistic
from eval.metrics.pairs import mean_recall_statistic
from eval.results.records import Score, read_results
from eval.results.table import read_table
from eval.tasks import TASKS, Options
from tests.eval.conftest import png

WriteDataset = Callable[..., Path]


def by_metric(scores: list[Score]) -> dict[str, Score]:
    return {score.metric: score for score in scores}


@pytest.mark.parametrize("image_tokens", [0, 9])
def test_encoder_features_equal_public_api(
    model: CLIP, write_dataset: WriteDataset, image_tokens: int
) -> None:
    if image_tokens:
        model = create(model.architecture.replace_size(image_tokens=image_tokens), seed=0).eval()
    dataset = evaluation.open_dataset(write_dataset())
    seen: list[int] = []
    model.train()
    try:
        features = Encoder(model, batch_size=5, progress=seen.append).images(dataset)
        assert model.training
    finally:
        model.eval()
    images = [dataset.images.read(i) for i in range(len(dataset))]
    expected = clipkit.encode_image(images, model)
    assert features.projected.dtype == features.before_projection.dtype == torch.float32
    torch.testing.assert_close(features.projected, expected, atol=1e-6, rtol=0)
    projection = model.get_parameter("visual.proj").detach()
    projected = torch.nn.functional.normalize(features.before_projection @ projection, dim=1)
    torch.testing.assert_close(projected, expected, atol=1e-6, rtol=0)
    assert seen == [5, 5, 5, 5, 3]


def test_zero_shot_equals_plain_loop(model: CLIP, write_dataset: WriteDataset) -> None:
    dataset = evaluation.open_dataset(write_dataset())
    scores = by_metric(evaluation.evaluate(model, dataset))
    assert list(scores) == ["acc1", "acc5", "mean_per_class_recall"]
    assert dataset.labels is not None
    top1, top5, per_class = 0, 0, [[0, 0] for _ in range(7)]
    for i, label in enumerate(dataset.labels.tolist()):
        image = clipkit.encode_image(dataset.images.read(i), model)[0]
        similarities = []
        for name in dataset.class_names:
            prompts = clipkit.encode_text([t.replace("{c}", name) for t in dataset.templates], model)
            mean = prompts.mean(dim=0)
            similarities.append(float(image @ (mean / mean.norm())))
        order = sorted(range(7), key=lambda c: -similarities[c])
        top1 += order[0] == label
        top5 += label in order[:5]
        per_class[label][0] += order[0] == label
        per_class[label][1] += 1
    assert scores["acc1"].value == pytest.approx(top1 / 23)
    assert scores["acc5"].value == pytest.approx(top5 / 23)
    assert scores["mean_per_class_recall"].value == pytest.approx(sum(a / b for a, b in per_class) / 7)
    assert [s.chance for s in scores.values()] == pytest.approx([1 / 7, 5 / 7, 1 / 7])
    assert {(s.n, s.task, s.dataset) for s in scores.values()} == {(23, "zero-shot", "colours")}
    for score in scores.values():
        assert score.low is not None and score.high is not None
        assert 0 <= score.low <= score.value <= score.high <= 1


def test_models_in_memory_are_distinguished_by_weights(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    folder, out = write_dataset(), tmp_path / "results.jsonl"
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.visual.parameters()).add_(1)
    for one in (model, other, copy.deepcopy(model)):
        evaluation.evaluate(one, folder, out=out)
    models = read_table([out]).models
    assert len(models) == 2 and len({one.label for one in models}) == 2
    assert all(one.label.startswith("in memory (") for one in models)


def test_acc5_is_omitted_for_five_classes(model: CLIP, write_dataset: WriteDataset) -> None:
    folder = write_dataset(labels=[0, 1, 2, 3, 4], class_names=list("abcde"))
    assert list(by_metric(evaluation.evaluate(model, folder))) == ["acc1", "mean_per_class_recall"]


def test_retrieval_of_a_table_with_a_row_per_caption(
    model: CLIP, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lists = []
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(png(i))
        lists.append({"image": f"{i}.png", "caption": [f"thing {i} {j}" for j in range(1 + i % 5)]})
    rows = [{"image": one["image"], "caption": text} for one in lists for text in one["caption"]]
    rows.sort(key=lambda row: row["caption"][-1])  # rows of an image are not adjacent
    scores = {}
    for name, table, group in (("lists", lists, True), ("rows", rows, True), ("apart", rows, False)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        pack(tmp_path / f"{name}.jsonl", tmp_path / name, PackOptions(test=1, group=group), progress=False)
        out = tmp_path / f"{name}-results.jsonl"
        found = evaluation.evaluate(model, tmp_path / name, tasks=["retrieval"], out=out)
        scores[name] = [replace(score, dataset="") for score in found]
        equal_images = {line["equal_images"] for line in read_results(out)}
        notes = "".join(read_table([out]).notes)
        if group:
            assert (equal_images, notes, caplog.text) == ({0}, "", "")
    assert scores["rows"] == scores["lists"]
    assert (len(rows), equal_images) == (21, {19})  # two images have a single caption
    assert "dataset apart: 19 of 21 test images are equal to another" in caplog.text
    assert "apart: 19 images equal to another" in notes


def test_equal_images_with_equal_captions_are_not_noted(
    model: CLIP, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DatasetWriter(tmp_path / "set") as writer:
        for i in range(4):
            writer.write(
                "test", Record(key=f"{i}", image=png(i // 2), extension="png", caption=f"c {i // 2}")
            )
        writer.finish({"tasks": ["retrieval"]})
    evaluation.evaluate(model, tmp_path / "set", tasks=["retrieval"], out=tmp_path / "out.jsonl")
    assert {line["equal_images"] for line in read_results(tmp_path / "out.jsonl")} == {0}
    assert not caplog.text


def test_retrieval_equals_plain_loop(model: CLIP, write_dataset: WriteDataset) -> None:
    # several captions per image, captions of several images, and one repeated caption of an image
    captions = [f"thing {i}\nkind {i % 5}" + ("\nkind 1" if i == 1 else "") for i in range(12)]
    folder = write_dataset(labels=[None] * 12, captions=captions, class_names=None, templates=None)
    dataset = evaluation.open_dataset(folder)
    scores = by_metric(evaluation.evaluate(model, dataset, tasks=["retrieval"]))
    assert dataset.captions is not None
    listed = [(i, caption) for i, own in enumerate(dataset.captions) for caption in own]
    images = clipkit.encode_image([dataset.images.read(i) for i in range(12)], model)
    texts = clipkit.encode_text([caption for _, caption in listed], model)
    similarity = images @ texts.T  # (12, 25)
    right = torch.tensor([[caption in own for _, caption in listed] for own in dataset.captions])
    subject = Subject(
        Encoder(model), dataset, metrics=("image_to_text_R@3", "text_to_image_R@3", "mean_recall")
    )
    outcome = TASKS["retrieval"].run(subject, Options(details=True))
    assert scores.items() <= by_metric(outcome.scores).items()
    scores = by_metric(outcome.scores)
    for k in (1, 3, 5, 10):
        for name, values, mask in (
            ("image_to_text", similarity, right),
            ("text_to_image", similarity.T, right.T),
        ):
            top = values.topk(k, dim=1).indices
            expected = mask.gather(1, top).any(dim=1).double().mean().item()
            score = scores[f"{name}_R@{k}"]
            assert score.value == pytest.approx(expected)
            assert score.n == len(values)
            assert score.chance is not None and 1 / 25 < score.chance <= 1
        ranks = (values > values.masked_fill(~mask, -9).amax(dim=1, keepdim=True)).sum(dim=1) + 1
        assert scores[f"{name}_mean_rank"].value == pytest.approx(ranks.double().mean().item())
        assert scores[f"{name}_median_rank"].value == ranks.double().quantile(0.5).item()
    assert len(scores) == 14
    (details,) = outcome.details
    for name, ks in (("mean_R@1", (1,)), ("mean_recall", (1, 5, 10))):
        mean = scores[name]
        parts = [scores[f"{way}_R@{k}"] for way in ("image_to_text", "text_to_image") for k in ks]
        assert mean.value == pytest.approx(sum(part.value for part in parts) / len(parts))
        assert mean.chance == pytest.approx(sum(part.chance or 0 for part in parts) / len(parts))
        assert mean.low is not None and mean.high is not None and mean.low < mean.value < mean.high
        items = details.values[name].tensor().view(12, 3)
        assert evaluate_statistic(mean_recall_statistic(items), 12) == pytest.approx(mean.value)
    assert details.right["text_to_image_R@3"].tensor().double().mean() == scores["text_to_image_R@3"].value


def test_chance_of_plain_pairs_is_k_over_n(model: CLIP, write_dataset: WriteDataset) -> None:
    folder = write_dataset(labels=[None] * 8, captions=[f"thing {i}" for i in range(8)], class_names=None)
    scores = by_metric(evaluation.evaluate(model, folder))
    assert {name: score.chance for name, score in scores.items() if score.chance} == pytest.approx(
        {f"{way}_R@{k}": k / 8 for way in ("image_to_text", "text_to_image") for k in (1, 5)}
        | {"mean_R@1": 1 / 8}
    )


class Meeting:
    """Two threads as two ranks: ``gather`` returns the sum to both, and fails if only one calls it."""

    def __init__(self) -> None:
        self.values: list[Tensor | None] = [None, None]
        self.barrier = threading.Barrier(2, timeout=120)

    def gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        def add(values: Tensor) -> Tensor:
            self.values[rank] = values.clone()
            self.barrier.wait()
            first, second = self.values
            assert first is not None and second is not None
            total = first + second
            self.barrier.wait()
            return total

        return add

    def run(self, work: Callable[[Ranks], object]) -> list[object]:
        outcomes: list[object] = [None, None]

        def one(rank: int) -> None:
            try:
                outcomes[rank] = work(Ranks(rank=rank, world=2, gather=self.gather(rank)))
            except DataError as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


@pytest.mark.parametrize("count", [1, 23])
def test_two_ranks_give_same_scores_as_one(model: CLIP, write_dataset: WriteDataset, count: int) -> None:
    captions = [f"thing {i}" for i in range(23)]
    tasks = ["zero-shot", "retrieval"] if count > 1 else ["zero-shot"]
    folder = write_dataset(
        labels=[i % 7 for i in range(count)], captions=captions[:count], card={"tasks": tasks}
    )
    dataset = evaluation.open_dataset(folder)
    alone = evaluation.evaluate(model, dataset)
    out = folder / "results.jsonl"

    def work(ranks: Ranks) -> list[Score]:
        return evaluation.evaluate(
            model,
            dataset,
            batch_size=4,
            ranks=ranks,
            out=out,
            step=7,
        )

    first, second = Meeting().run(work)
    assert first == second == alone
    lines = evaluation.read_results(out)
    assert [(line["step"], line["metric"], line["value"]) for line in lines] == [
        (7, score.metric, score.value) for score in alone
    ]


@pytest.mark.parametrize("tower", ["visual", "transformer"])
def test_nan_weights_are_rejected(model: CLIP, write_dataset: WriteDataset, tower: str) -> None:
    broken = copy.deepcopy(model)
    for name, weights in broken.named_parameters():
        if name.startswith(tower):
            weights.data.fill_(math.nan)
    dataset = evaluation.open_dataset(write_dataset(captions=[f"thing {i}" for i in range(23)]))
    for task in ("zero-shot", "retrieval"):
        with pytest.raises(DataError, match=r"^the features of .* are not finite: the training"):
            evaluation.evaluate(broken, dataset, tasks=[task])


def test_huge_batch_size_gives_same_scores(model: CLIP, write_dataset: WriteDataset) -> None:
    dataset = evaluation.open_dataset(write_dataset())
    assert evaluation.evaluate(model, dataset, batch_size=10**20) == evaluation.evaluate(model, dataset)


def break_image(folder: Path, key: str) -> None:
    """Replace an image in a shard by bytes that do not decode."""
    for shard in (folder / "test").glob("*.tar"):
        with tarfile.open(shard) as tar:
            members = [(m, tar.extractfile(m).read()) for m in tar.getmembers()]  # type: ignore[union-attr]
        with tarfile.open(shard, "w") as tar:
            for member, data in members:
                data = b"not an image" if member.name == f"{key}.png" else data
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def test_undecodable_image_is_named_on_every_rank(model: CLIP, write_dataset: WriteDataset) -> None:
    folder = write_dataset()
    break_image(folder, "s0000013")
    dataset = evaluation.open_dataset(folder)
    message = r"dataset colours: image s0000013 of .*1\.tar: not an image in a known format; .*"
    with pytest.raises(DataError, match=message):
        evaluation.evaluate(model, dataset, batch_size=4)
    outcomes = Meeting().run(lambda ranks: Encoder(model, ranks=ranks).images(dataset))
    assert all(isinstance(outcome, DataError) and "s0000013" in str(outcome) for outcome in outcomes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("eval-decode")]


def test_requirements_of_tasks_are_checked_before_encoding(model: CLIP, write_dataset: WriteDataset) -> None:
    def refused(folder: Path, task: str) -> str:
        with pytest.raises(DataError) as caught:
            evaluation.evaluate(model, folder, tasks=[task], progress=lambda _: pytest.fail("encoded"))
        return str(caught.value)

    labelled = write_dataset("labelled")
    pairs = write_dataset("pairs", labels=[None] * 3, captions=["a", "b", "c"], class_names=None)
    unnamed = write_dataset("unnamed", class_names=None)
    same = write_dataset("same", captions=["thing"] * 23)
    assert "no captions" in refused(labelled, "retrieval")
    assert "no labels" in refused(pairs, "zero-shot")
    assert "no classnames.txt" in refused(unnamed, "zero-shot")
    assert "the same caption for all" in refused(same, "retrieval")
    with pytest.raises(ConfigError, match="did you mean 'zero-shot'"):
        evaluation.evaluate(model, labelled, tasks=["zeroshot"])


def test_tasks_share_encodings(model: CLIP, write_dataset: WriteDataset) -> None:
    folder = write_dataset(
        captions=[f"thing {i}" for i in range(23)], card={"tasks": ["zero-shot", "retrieval"]}
    )
    seen: list[int] = []
    subject = Subject(Encoder(model, progress=seen.append), evaluation.open_dataset(folder))
    scores = evaluation.evaluate(subject)
    assert subject.encoder.encoded == {"images": 23, "texts": 14 + 23}
    assert sum(seen) == 23
    assert scores == evaluation.evaluate(model, folder)
    assert {score.task for score in scores} == {"zero-shot", "retrieval"}


def test_evaluation_keeps_training_mode_and_random_state(model: CLIP, write_dataset: WriteDataset) -> None:
    folder = write_dataset()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model.train()
    try:
        evaluation.evaluate(model, folder)
        assert model.training and torch.equal(torch.get_rng_state(), before)
        model(torch.zeros(2, 3, 16, 16), clipkit.tokenize(["a", "b"]))[0].sum().backward()
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()


def test_similarities_are_float32_under_autocast(model: CLIP, write_dataset: WriteDataset) -> None:
    dataset = evaluation.open_dataset(write_dataset())
    subject = Subject(Encoder(model), dataset)
    plain = evaluation.evaluate(subject)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evaluation.evaluate(subject) == plain  # encoded features are not rounded
        assert evaluation.provenance(model, dataset, weights="w")["dtype"] == dtype_name(model) == "bfloat16"
        mixed = Subject(Encoder(model), dataset)
        assert mixed.images().projected.dtype == mixed.class_weights().dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # warnings of open_clip at import
def test_classifier_equals_open_clip(model: CLIP, write_dataset: WriteDataset) -> None:
    import open_clip

    twin = open_clip.CLIP(
        embed_dim=16,
        vision_cfg={"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
        text_cfg={"width": 32, "layers": 1, "heads": 2},
    ).eval()
    twin.load_state_dict(model.state_dict())
    dataset = evaluation.open_dataset(write_dataset())
    expected = open_clip.build_zero_shot_classifier(
        twin,
        tokenizer=open_clip.get_tokenizer("ViT-B-32"),
        classnames=dataset.class_names,
        templates=[lambda name, t=template: t.replace("{c}", name) for template in dataset.templates],
        num_classes_per_batch=3,
    )
    torch.testing.assert_close(Subject(Encoder(model), dataset).class_weights(), expected, atol=1e-6, rtol=0)


def test_class_head_uses_names_without_prompts(model: CLIP, write_dataset: WriteDataset) -> None:
    names = ["blue", "green", "red"]
    head = attach_class_head(model, names, torch.eye(3, model.architecture.embed_dim))
    folder = write_dataset(labels=[0, 1, 2], class_names=["red", "blue", "green"], templates=["a {c} square"])
    scores = by_metric(evaluation.evaluate(head, folder))
    dataset = evaluation.open_dataset(folder)
    images = Encoder(head).images(dataset).projected
    guessed = (images @ torch.as_tensor(clipkit.encode_text(["red", "blue", "green"], head)).T).argmax(1)
    assert scores["acc1"].value == (guessed == torch.tensor([0, 1, 2])).double().mean().item()
    evaluation.select_tasks(dataset, classes=names)
    with pytest.raises(DataError, match="cannot be scored by zero-shot: 'red' is not one of the"):
        evaluation.select_tasks(dataset, classes=["blue", "green"])


@pytest.mark.parametrize("own_card", [False, True])
def test_folder_is_scored_as_by_the_command(model: CLIP, tmp_path: Path, own_card: bool) -> None:
    places = tmp_path / "places"
    for i in range(6):
        file = places / ("n01440764", "n02085620")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(i))
    if own_card:
        (places / "card.toml").write_text(
            'title = "Places"\ntasks = ["zero-shot"]\nmetric = "mean_per_class_recall"\n'
            'keys = ["n01440764", "n02085620"]\n[prompts.own]\nsource = "us"\ntemplates = ["a drawing of {c}"]\n'
            'names = { n01440764 = "a fish", n02085620 = "a dog" }\n'
        )
    (target,) = evaluation.find_targets([str(places)])
    expected = ("a fish", "a dog") if own_card else ("tench", "Chihuahua")
    assert target.dataset.class_names == expected
    out = tmp_path / "results.jsonl"
    scores = evaluation.evaluate(model, places, out=out)
    if own_card:
        assert [score.metric for score in scores] == ["mean_per_class_recall"]
    prompts = evaluation.provenance(model, target.dataset, weights="")["prompts"]
    assert {line["prompts"] for line in read_results(out)} == {prompts}
