"""Tests of published datasets from disk and from servers, against CLIP_benchmark's reader."""

import json
import logging
import socket
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, strategies as st
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples import MissingSplit
from clipkit.samples.remote import transfer
from clipkit.samples.remote.transfer import Patience, Unreachable
from eval.datasets.dataset import EvalDataset, read_text_file
from eval.datasets.targets import open_suites
from eval.readers import open_dataset, shards as places
from eval.readers.shards import Members, find_published, parse_npy, resolve_address
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import S3, Nginx
from tests.clipkit.samples.remote.test_hub import use

impatient = servers.impatient
nginx = servers.nginx
s3 = servers.s3

CLASSES = "  cube \n\nball\n\ncone\n"  # as published: a blank line is a class without a name
WIDTH = 5


def image_file(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 8 + seed, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "webp", lossless=True)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def publish(
    root: Path,
    samples: Sequence[dict[str, Any]],
    *,
    split: str = "test",
    classes: str | None = CLASSES,
    kind: str = "",
) -> Path:
    """Write a dataset like CLIP_benchmark's exporter, with the same library and two samples per shard."""
    (root / split).mkdir(parents=True)
    with webdataset.ShardWriter(str(root / split / "%d.tar"), maxcount=2, verbose=False) as sink:
        for number, sample in enumerate(samples):
            sink.write({"__key__": f"s{number:07d}", "webp": image_file(number), **sample})
        shards = sink.shard
    (root / split / "nshards.txt").write_text(f"{shards}\n")
    if classes is not None:
        (root / "classnames.txt").write_text(classes)
        (root / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n a {c}\n")
    if kind:
        (root / "dataset_type.txt").write_text(f"{kind}\n")
    return root


def labelled(labels: Sequence[int]) -> list[dict[str, Any]]:
    return [{"cls": label} for label in labels]


def multi(rows: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"npy": np.array(row)} for row in rows]


def refusal(source: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pixels(dataset: EvalDataset) -> list[bytes]:
    images = [dataset.images.read(number) for number in range(len(dataset))]
    return [Image.open(BytesIO(image)).convert("RGB").tobytes() for image in images]


@pytest.mark.parametrize("kind", ["", "multilabel", "retrieval"])
@pytest.mark.filterwarnings("ignore")  # warnings of CLIP_benchmark
def test_samples_equal_clip_benchmark(tmp_path: Path, kind: str) -> None:
    builder = pytest.importorskip("clip_benchmark.datasets.builder")
    samples = {
        "": labelled([4, 0, 1, 2, 3]),
        "multilabel": multi([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]]),
        "retrieval": [{"txt": "one\nuno"}, {"txt": "two\\nlines"}, {"txt": "three"}],
    }[kind]
    root = publish(tmp_path / "wds_x", samples, kind=kind, classes=None if kind == "retrieval" else CLASSES)
    theirs = builder.build_wds_dataset(
        "wds/x", lambda image: image.convert("RGB").tobytes(), "test", str(root)
    )
    ours = open_dataset(root)
    images, answers = zip(*theirs, strict=True)
    assert pixels(ours) == list(images)
    assert theirs.classes in (None, list(ours.class_names))
    assert theirs.templates in (None, list(ours.templates))
    if kind == "retrieval":
        assert ours.captions == tuple(map(tuple, answers)) and ours.tasks == ("retrieval",)
    else:
        assert ours.labels is not None and ours.tasks == ("zero-shot",)
        assert ours.labels.int().tolist() == np.array(answers).tolist()


def test_columns_of_metadata_are_read(tmp_path: Path) -> None:
    rows = ((3, 2016, 1), (1, 2017, 0), (3, 2016.5, 2))
    samples = [{"cls": y, "npy": np.array([region, year, y])} for region, year, y in rows]
    root = publish(tmp_path / "fmow", samples)
    plain, named = open_dataset(root), open_dataset(root, metadata_names=["region", "year", "y"])
    assert plain.metadata == {}
    assert {name: column.tolist() for name, column in named.metadata.items()} == {
        "region": [3, 1, 3],
        "year": [2016.0, 2017.0, 2016.5],
        "y": [1, 0, 2],
    }
    assert str(named.metadata["region"].dtype) == "torch.int64"
    assert "has 3 values in its npy, expected 2 columns: region, year" in refusal(
        root, metadata_names=["region", "year"]
    )
    lacking = publish(tmp_path / "lacking", [samples[0], {"cls": 1}])
    assert "sample s0000001 of" in refusal(lacking, metadata_names=["a", "b", "c"])
    assert "has no npy, expected 3 columns: a, b, c" in refusal(lacking, metadata_names=["a", "b", "c"])


def test_first_of_several_captions_is_the_right_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [{"txt": "a dog bites a man\na man bites a dog"}, {"txt": "x\ny\nx"}]
    dataset = open_dataset(publish(tmp_path / "order", samples, classes=None, kind="image_caption_selection"))
    assert dataset.choices == (("a dog bites a man", "a man bites a dog"), ("x", "y", "x"))
    assert (dataset.captions, dataset.tasks) == (None, ("compositional",))
    assert "1 image whose right caption is also among the wrong ones" in caplog.text
    one = publish(tmp_path / "one", [{"txt": "alone"}], classes=None, kind="image_caption_selection")
    assert "has 1 caption to choose from, expected at least 2" in refusal(one)


def test_captions_that_are_not_utf8_are_rejected_or_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples: list[dict[str, Any]] = [
        {"txt": "caf\u00e9 \ufffd"},
        {"txt": "caf\u00e9".encode("latin-1")},
        {"txt": "tea"},
    ]
    latin = publish(tmp_path / "latin", samples, classes=None, kind="retrieval")
    said = refusal(latin)
    assert said.startswith(
        "dataset latin: 1 sample with a caption that is not UTF-8, the first is s0000001 of "
    )
    assert said.endswith("0.tar: write the captions in UTF-8")
    labelled = [sample | {"cls": number % 2} for number, sample in enumerate(samples)]
    dataset = open_dataset(publish(tmp_path / "labelled", labelled, classes="a\nb\n"))
    assert (dataset.captions, dataset.tasks, len(dataset)) == (None, ("zero-shot",), 3)
    (warned,) = (record.getMessage() for record in caplog.records if "UTF-8" in record.getMessage())
    assert warned == "dataset labelled: 1 sample with a caption that is not UTF-8: captions are ignored"
    samples[1] = {"txt": "tea", "json": {"captions": ["tea", "half a pair \ud83d"]}}
    assert "the first is s0000001 of" in refusal(
        publish(tmp_path / "json", samples, classes=None, kind="retrieval")
    )


@pytest.mark.parametrize(
    ("samples", "names", "told"),
    [
        (
            [{"cls": 0}, {"cls": 1}],
            ["a", "a"],
            "/0.tar: 1 more cls in samples that have one already, 1 more webp in samples that have one already: ",
        ),
        (
            [{"cls": 0, "png": b"another"}],
            ["a"],
            "0.tar has several images, png, webp: choose one with --image",
        ),
        ([{"cls": 0}, {"cls": 1}, {"cls": 0}], ["a", "b", "a"], ""),  # equal keys that are not adjacent
    ],
)
def test_adjacent_samples_with_equal_keys_are_rejected(
    tmp_path: Path, samples: list[dict[str, Any]], names: list[str], told: str
) -> None:
    keyed = [{**sample, "__key__": name} for sample, name in zip(samples, names, strict=True)]
    folder = publish(tmp_path / "set", keyed)
    if told:
        assert told in refusal(folder)
    else:
        labels = open_dataset(folder).labels
        assert labels is not None and labels.tolist() == [0, 1, 0]


def test_one_of_several_images_can_be_chosen(tmp_path: Path) -> None:
    samples = [{"cls": number, "png": b"%d" % number} for number in range(2)]
    folder = publish(tmp_path / "set", samples)
    assert "has several images, png, webp: choose one with --image" in refusal(folder)
    dataset = open_dataset(folder, members=Members(image="png"))
    assert [dataset.images.read(number) for number in range(2)] == [b"0", b"1"]


def test_invalid_multi_hot_labels_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sound = [1, 0, 0, 1, 0]
    for number, (row, said) in enumerate(
        [
            (
                [1, 0, 0, 1],
                "has 4 values in its npy, expected labels of 5 classes, the lines of classnames.txt",
            ),
            ([2, 0, 0, 1, 0], "values other than 0 and 1"),
            (np.array([{}] * WIDTH, dtype=object), "Object arrays cannot be loaded"),
            (["a"] * WIDTH, "only arrays of numbers are read"),
        ]
    ):
        data = row if isinstance(row, np.ndarray) else np.array(row)
        root = publish(
            tmp_path / f"{number}", [{"npy": npy(np.array(sound))}, {"npy": npy(data)}], kind="multilabel"
        )
        message = refusal(root)
        assert said in message and "s0000001" in message and f"dataset {number}: " in message
    lost = publish(tmp_path / "lost", [{"npy": np.array(sound)}, {"cls": 1}], kind="multilabel")
    assert "has no npy, expected labels of 5 classes" in refusal(lost)
    with caplog.at_level(logging.WARNING, "eval"):
        open_dataset(publish(tmp_path / "empty", multi([sound]), kind="multilabel"))
    told = [
        "class names shared by several classes: ''",
        "its images show 2 of 5 classes; the names of the others remain possible answers: '', 'ball', 'cone'",
    ]
    assert [record.getMessage().partition("empty: ")[2] for record in caplog.records] == told


@given(st.binary(max_size=300), st.integers(0, 200))
def test_damaged_npy_files_are_rejected(data: bytes, at: int) -> None:
    values = np.asfortranarray(np.arange(6).reshape(2, 3))
    whole = npy(values)
    assert parse_npy(whole).tolist() == values.tolist()
    for hostile in (data, whole[:at], whole[:at] + data, whole[:10] + data, whole[:-1]):
        if len(hostile) != len(whole) or hostile[:100] != whole[:100]:  # else it is a valid array
            with pytest.raises(DataError, match="npy"):
                parse_npy(hostile)
    huge = whole.replace(b"(2, 3), }" + b" " * 9, b"(2, 9999999999), }")
    with pytest.raises(DataError, match="its npy cannot be read"):
        parse_npy(huge)


def serve(nginx: Nginx, root: Path, name: str) -> str:
    for file in root.rglob("*.*"):
        nginx.put(f"{name}/{file.relative_to(root)}", file.read_bytes())
    return nginx.url(name)


def test_dataset_is_read_over_http(tmp_path: Path, nginx: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    root = publish(tmp_path / "wds_many", multi(rows), kind="multilabel")
    publish(root, multi(rows[:1]), split="train", classes=None)
    here = open_dataset(root)
    serve(nginx, root, "datasets/who/wds_many/resolve/main")
    monkeypatch.setenv("HF_ENDPOINT", nginx.url("").rstrip("/"))
    page = nginx.url("datasets/who/wds_many/tree/main")
    there = open_dataset(page)
    assert there.name == "wds_many"
    assert there.labels is not None and there.labels.int().tolist() == rows
    assert (there.class_names, there.templates) == (here.class_names, here.templates)
    asked = len(nginx.requests())
    assert pixels(there) == pixels(here)
    assert len(nginx.requests()) == asked  # its shards are in the cache
    assert len(open_dataset(page, split="train")) == 1
    owner = nginx.url("datasets/who")
    assert find_published(owner, ["few", "many"]) == f"{owner}/wds_many"
    assert open_dataset("many", root=owner).revision == there.revision

    with pytest.raises(MissingSplit, match=r"main has no split 'val', only test, train"):
        open_dataset(page, split="val")
    nginx.put("datasets/who/wds_many/resolve/main/test/nshards.txt", b"3\n")
    assert "has 2 shards, but nshards.txt says '3'" in refusal(page)
    nginx.put("datasets/who/wds_many/resolve/main/test/nshards.txt", b"many")
    assert "says 'many', expected a number" in refusal(page)
    nginx.put("datasets/who/wds_many/resolve/main/classnames.txt", b"caf\xe9\n")
    nginx.put("datasets/who/wds_many/resolve/main/test/nshards.txt", b"2\n")
    assert "classnames.txt is not UTF-8 text" in refusal(page)


def test_single_tar_is_read_from_a_file_and_over_http(tmp_path: Path, nginx: Nginx) -> None:
    root = publish(tmp_path / "pairs", [{"txt": f"image {number}"} for number in range(5)], classes=None)
    (root / "card.json").write_text('{"samples": {"test": 5}}')
    tar = root / "test/1.tar"
    here = open_dataset(tar)
    assert open_dataset(f"file://{tar}").captions == here.captions
    there = open_dataset(nginx.put("pairs/1.tar", tar.read_bytes()))
    assert here.captions == there.captions == (("image 2",), ("image 3",))
    assert pixels(here) == pixels(there) == pixels(open_dataset(root))[2:4]
    assert here.tasks == there.tasks == ("retrieval",)
    both = open_dataset(root / "test/{0..1}.tar")
    assert (both.name, both.captions) == ("test", tuple((f"image {number}",) for number in range(4)))
    with pytest.raises(MissingSplit, match=r"has no split 'train': all of .* is for testing"):
        open_dataset(tar, split="train")


def test_dataset_is_read_from_the_hub(tmp_path: Path, nginx: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    root = publish(tmp_path / "wds_pets", labelled([0, 1, 4]))
    serve(nginx, root, "datasets/who/wds_pets/resolve/main")
    nginx.put("about", b'{"id": "who/wds_pets", "_id": "1", "sha": "1", "siblings": [], "tags": []}')
    nginx.put("tree", b'[{"type": "directory", "path": "test", "size": 0, "oid": "3"}]')
    shards = []
    for shard in sorted((root / "test").glob("*.tar")):
        status = (nginx.html / "datasets/who/wds_pets/resolve/main/test" / shard.name).stat()
        etag = f"{int(status.st_mtime):x}-{status.st_size:x}"  # in nginx's format
        entry = {"type": "file", "path": f"test/{shard.name}", "size": status.st_size, "oid": etag}
        shards.append(entry)
    nginx.put("test", json.dumps(shards).encode())
    api = "/api/datasets/who/wds_pets"
    nginx.add(f"""
        location /api/ {{ add_header X-Error-Code EntryNotFound always; return 404; }}
        location = {api} {{ default_type application/json; try_files /about =404; }}
        location = {api}/revision/main {{ default_type application/json; try_files /about =404; }}
        location = {api}/tree/main {{ default_type application/json; try_files /tree =404; }}
        location = {api}/tree/main/test {{ default_type application/json; try_files /test =404; }}
    """)
    use(nginx.url("").rstrip("/"), monkeypatch)
    dataset = open_dataset("pets", root="hf://datasets/who")
    assert dataset.labels is not None and dataset.labels.tolist() == [0, 1, 4]
    assert pixels(dataset) == pixels(open_dataset(root)) and dataset.name == "pets"
    with pytest.raises(MissingSplit, match="hf://datasets/who/wds_pets has no split 'train', only test"):
        open_dataset("hf://datasets/who/wds_pets", split="train")


def test_dataset_is_found_by_name(tmp_path: Path, nginx: Nginx) -> None:
    data = tmp_path / "data"
    publish(data / "wds_vtab-dtd_test", labelled([0, 1]))
    publish(data / "wds_pets", labelled([0]))
    assert find_published(data, ["dtd", "vtab/dtd"]) == str(data / "wds_vtab-dtd_test")
    assert find_published(data, ["cars"]) is None
    dataset = open_dataset("vtab/dtd", root=data)
    assert (dataset.name, len(dataset)) == ("vtab-dtd", 2)
    assert refusal("cars", root=data).endswith(f", nor a dataset under {data}")
    serve(nginx, data, "sets")
    assert find_published(nginx.url("sets"), ["cars", "pets"]) == nginx.url("sets/wds_pets")
    assert len(open_dataset("pets", root=nginx.url("sets"))) == 1
    nginx.kill()
    assert "gave up after" in refusal("cars", root=nginx.url("sets"))


def test_dataset_is_read_from_a_bucket(tmp_path: Path, s3: S3) -> None:
    root = publish(tmp_path / "wds_in_bucket", labelled([4, 0, 1]))
    for file in root.rglob("*.*"):
        s3.put(f"sets/wds_in_bucket/{file.relative_to(root)}", file.read_bytes())
    dataset = open_dataset("in_bucket", root="s3://pairs/sets")
    assert dataset.labels is not None and dataset.labels.tolist() == [4, 0, 1]
    assert pixels(dataset) == pixels(open_dataset(root))
    s3.client.delete_object(Bucket="pairs", Key="sets/wds_in_bucket/test/0.tar")
    assert "has 1 shard, but nshards.txt says '2'" in refusal("s3://pairs/sets/wds_in_bucket")
    s3.client.delete_object(Bucket="pairs", Key="sets/wds_in_bucket/test/nshards.txt")
    assert "shard 0.tar is missing" in refusal("s3://pairs/sets/wds_in_bucket")
    with pytest.raises(MissingSplit, match="s3://pairs/sets/wds_in_bucket has no split 'train', only test"):
        open_dataset("s3://pairs/sets/wds_in_bucket", split="train")


def test_page_addresses_of_hugging_face_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    at = "https://huggingface.co/datasets/clip-benchmark/wds_vtab-dtd"
    for page in (at, f"{at}/", f"{at}/tree/main", f"{at}/tree/main/", f"{at}/raw/main"):
        assert resolve_address(page) == f"{at}/resolve/main"
    assert resolve_address(f"{at}/tree/v1/sub/folder") == f"{at}/resolve/v1/sub/folder"
    for other in (
        "https://example.org/datasets/a/b/tree/main",
        "s3://pairs/sets",
        "https://huggingface.co/a/b",
    ):
        assert resolve_address(other) == other


def test_statistics_beside_shards_are_ignored(tmp_path: Path) -> None:
    root = publish(tmp_path / "x", labelled([0, 1, 2]))
    (root / "test" / "0_stats.json").write_text(json.dumps({"successes": 1}))
    assert len(open_dataset(root)) == 3


def test_unreachable_root_is_contacted_once_for_all_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        root = f"http://127.0.0.1:{taken.getsockname()[1]}/sets"
        asked: list[str | Path] = []

        def asking(place: str | Path) -> str | None:
            asked.append(place)
            return read_text_file(place)

        monkeypatch.setattr(places, "read_text_file", asking)
        said = []
        for name in ("one", "two", "three"):
            with pytest.raises(Unreachable) as caught:
                find_published(root, [name])
            said.append(str(caught.value))
        assert len(asked) == 1 and len(set(said)) == 1
        now = time.monotonic()
        monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: now + 61))
        with pytest.raises(Unreachable):
            find_published(root, ["one"])
        assert len(asked) == 2  # it is tried again after a minute


def test_failing_server_is_reported_once_for_all_datasets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not as missing datasets, and without retries for every name of every dataset."""
    asked: list[str] = []

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(int(self.path.split("/")[1]))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(transfer, "PATIENCE", Patience(tries=2, first_wait=0.01, contact_waits=(0.01,)))
    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            for status in (500, 503, 400):
                asked.clear()
                root = f"http://127.0.0.1:{server.server_port}/{status}"
                targets, trouble = open_suites(["datacomp38"], root=root)
                assert not targets
                told = [str(one) for one in trouble if "status" in str(one)]
                assert len(told) == 1 and f"(status {status})" in told[0] and " not available: " in told[0]
                assert isinstance(next(one for one in trouble if "status" in str(one)), Unreachable)
                assert len(asked) <= 2 and len(set(asked)) == 1
            root = f"http://127.0.0.1:{server.server_port}/404"
            assert find_published(root, ["mnist"]) is None
        finally:
            server.shutdown()
            thread.join()


def test_rewritten_shard_has_another_stamp(tmp_path: Path) -> None:
    """Features are looked up by the stamp, and other pixels may have the same number of bytes."""
    root = publish(tmp_path / "x", labelled([0, 1, 2]))
    first = open_dataset(root)
    assert open_dataset(root).stamp == first.stamp
    shard = root / "test" / "1.tar"
    content = shard.read_bytes()
    shard.write_bytes(content.replace(image_file(2)[-9:], bytes(9)))
    assert shard.stat().st_size == len(content) and shard.read_bytes() != content
    second = open_dataset(root)
    assert second.revision == first.revision and second.stamp != first.stamp
