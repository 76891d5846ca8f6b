"""Compare the time from the command to a target score: clipkit, and open_clip's own trainer on the same shards.

    python -m bench.time_to_score {glyphs,emoji} [--seeds 0] [--every 100] [--rates LR …] [--lengths 1 2 4]
                                  [--own-lengths 1] [--targets DATASET=SCORE …] [--work runs/time_to_score]
                                  [--note TEXT]

``glyphs`` trains ``configs/quickstart.toml``, ``emoji`` trains ``configs/emoji.toml``. The peer is
``open_clip_train.main`` with a model of the same shape, its own loss, optimizer and data pipeline, and documented
flags only. It runs in one process, because it wraps models in DistributedDataParallel with ``device_ids``, which
CPUs refuse. Two packages of it are in the folder WORK/packages: pandas, which it needs, and webdataset 0.2.86,
because it fails with 1.0. The corpus is split into shards of 1,000 samples, which both read.

Rules:

* The clock starts with the command. clipkit starts with an empty cache, except for the rendered evaluation sets, so
  that start-up, indexing, training, checkpoints and evaluations count, until an evaluation reaches all targets.
* open_clip's trainer does not evaluate on these datasets. It writes a checkpoint where clipkit evaluates, every
  ``--every`` steps, and the checkpoints are scored afterwards. Its time at checkpoint k is its own time until that
  is written, plus k times the seconds of clipkit's median evaluation.
* Both use the same batch size, precision, images, augmentation, context length and cores (``--cores`` of them), and
  the same model, except that open_clip's cannot have the recipe's ``model.image_options``, half of a ResNet's
  channels: its ResNet has all.
  clipkit has the settings of its recipe, and its schedule the best of ``--own-lengths``, multiples of the recipe's
  number of steps. open_clip has AdamW with its default moments, the warm-up, weight decay and clipping of the
  recipes with AdamW, and the best of ``--rates``. If no rate reaches the targets with the first of ``--lengths``,
  multiples of the same number, all are tried with the next. The fastest run counts.

The first seed selects rate and lengths; runs with further seeds use these. Each run is recorded in
``bench/results/records/time_to_score_CORPUS/``: a log with the seconds of each line, and a JSON file with the
command, commit, versions, seed, and the curve of scores over seconds. Runs that are recorded with the same command
and settings are not repeated; delete their JSON files to measure again. Use a machine without other work.

``bench/results/records/time_to_score.jsonl`` has a row for each corpus and commit that was measured. ``--note``
says what changed since the row before. The row is also printed as a line for the table in ``bench/README.md``.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from webdataset import TarWriter

import clipkit
from clipkit.config import Config, load_config, to_toml
from clipkit.model.names import to_open_clip
from clipkit.model.preprocess import Preprocess
from clipkit.objectives import select_terms
from clipkit.training.build import shape_of
from clipkit.training.costs import computes_in_bf16
from data.corpora.builtin import built_in
from eval import open_datasets
from eval.run import evaluate

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "records" / "time_to_score.jsonl"
PACKAGES = ("webdataset==0.2.86", "pandas>=2.2", "python-dateutil", "pytz", "tzdata", "six")
VERSIONS = ("torch", "open_clip_torch", "webdataset", "timm", "numpy")
PER_SHARD = 1000
PEER = """
import sys, open_clip
open_clip.add_model_config(sys.argv[1])
from open_clip_train.main import main
main(sys.argv[2:])
"""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What is trained on, how, and to which zero-shot top-1 accuracy by evaluation set.

    Attributes:
        config: clipkit's recipe.
        targets: accuracy by dataset, 0 … 1.
        rates: learning rates of open_clip.
        flags: further flags of open_clip; the augmentation equals that of ``config``.
    """

    config: str
    targets: dict[str, float]
    rates: tuple[float, ...]
    flags: tuple[str, ...]


CORPORA = {
    "glyphs": Corpus(
        config="configs/quickstart.toml",
        targets={"digits": 0.55, "glyphs": 0.80},
        rates=(5e-4, 1.5e-3, 3e-3),
        flags=("--warmup", "300", "--wd", "0.1"),
    ),
    "emoji": Corpus(
        config="configs/emoji.toml",
        targets={"emoji": 0.20},
        rates=(5e-4, 1e-3, 2e-3),
        flags=(
            *("--warmup", "100", "--wd", "0.2", "--aug-cfg", "scale=(0.7,1.0)", "gray_scale_prob=0.2"),
            *("color_jitter=(0.4,0.4,0.4,0.1)", "color_jitter_prob=0.8"),
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The comparison on one corpus.

    Attributes:
        name: of the corpus.
        corpus: as in ``CORPORA``, perhaps with other targets or rates.
        config: settings of clipkit's run, including the number of steps.
        every: steps between evaluations, and between open_clip's checkpoints.
        work: folder for shards, packages and runs, relative to the repository.
        seconds: seconds of one of clipkit's evaluations.
    """

    name: str
    corpus: Corpus
    config: Config
    every: int
    work: Path
    seconds: float = 0.0

    @property
    def shards(self) -> str:
        """Brace pattern of the training shards."""
        last = len([*(ROOT / self.work / self.name).glob("*.tar")]) - 1
        return f"{self.work}/{self.name}/{{00000..{last:05d}}}.tar"

    @property
    def records(self) -> Path:
        return RESULTS / "records" / f"time_to_score_{self.name}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("corpus", choices=CORPORA)
    add("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    add("--every", type=int, default=100, help="steps between evaluations (default: 100)")
    add("--rates", type=float, nargs="+", help="learning rates of open_clip")
    add("--lengths", type=int, nargs="+", default=[1, 2, 4], help="lengths of open_clip's schedule to try")
    add("--own-lengths", type=float, nargs="+", default=[1], help="lengths of clipkit's schedule to try")
    add("--targets", nargs="+", metavar="DATASET=SCORE", help="zero-shot accuracies to reach, 0 to 1")
    add("--cores", type=int, default=2, help="cores that both may use (default: 2)")
    add("--work", type=Path, default=Path("runs/time_to_score"))
    add("--out", type=Path, default=RESULTS / "time_to_score.json")
    add("--note", default="", help="what changed since the last row of records/time_to_score.jsonl")
    given = parser.parse_args()
    os.chdir(ROOT)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    corpus = CORPORA[given.corpus]
    if given.targets:
        pairs = (target.partition("=") for target in given.targets)
        corpus = replace(corpus, targets={name: float(value) for name, _, value in pairs})
    corpus = replace(corpus, rates=tuple(given.rates or corpus.rates))
    config = load_config(Path(corpus.config), [])
    bench = Bench(name=given.corpus, corpus=corpus, config=config, every=given.every, work=given.work)
    prepare(bench)

    own_tried = [trained_by_clipkit(bench, length, given.seeds[0]) for length in given.own_lengths]
    length = given.own_lengths[own_tried.index(min(own_tried, key=fastest))]
    own = [trained_by_clipkit(bench, length, seed) for seed in given.seeds]
    bench = replace(bench, seconds=statistics.median(one["evaluation_seconds"] for one in own))
    tried: list[dict[str, Any]] = []
    for length in given.lengths:
        tried += [trained_by_open_clip(bench, rate, length, given.seeds[0]) for rate in corpus.rates]
        if any(one["reached"] for one in tried):
            break
    best = min(tried, key=fastest)
    peer = [
        best,
        *(trained_by_open_clip(bench, best["rate"], best["length"], seed) for seed in given.seeds[1:]),
    ]
    report(bench, own, peer, own_tried, tried, given.out)
    print(format_row(add_row(bench.name, own, peer, given.note)))


def fastest(record: dict[str, Any]) -> tuple[float, float]:
    """Sort by the time to the targets, then by the highest mean score."""
    means = [statistics.mean(one["scores"].values()) for one in record["curve"]]
    return record["reached"] or float("inf"), -max(means)


def prepare(bench: Bench) -> None:
    """Render the datasets, split the training shards, and install open_clip's packages, once each."""
    source, shards = built_in(bench.name), bench.work / bench.name
    for name in bench.corpus.targets:
        built_in(name)
    if not shards.is_dir():
        aside = shards.with_name(f".{bench.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        tars = sorted((source / "train").glob("*.tar"), key=lambda path: int(path.stem))
        samples = (member for tar in tars for member in members(tar))
        for number in count():
            if not (part := [*islice(samples, PER_SHARD)]):
                break
            with TarWriter(str(aside / f"{number:05d}.tar"), mtime=0, encoder=False) as writer:
                for sample in part:
                    writer.write(sample)
        aside.rename(shards)
    packages = bench.work / "packages"
    if not packages.is_dir():
        aside = packages.with_name(".packages.partial")
        shutil.rmtree(aside, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(aside)]
        subprocess.run([*pip, *PACKAGES], check=True)
        aside.rename(packages)


def members(tar: Path) -> Iterator[dict[str, Any]]:
    """Yield the images and captions of a shard."""
    sample: dict[str, Any] = {}
    with tarfile.open(tar) as file:
        for member in file:
            key, _, extension = member.name.partition(".")
            if sample.get("__key__") != key:
                if sample:
                    yield sample
                sample = {"__key__": key}
            content = file.extractfile(member)
            assert content is not None
            if extension in ("png", "jpg", "webp", "txt"):
                sample[extension] = content.read()
    yield sample


def trained_by_clipkit(bench: Bench, length: float, seed: int) -> dict[str, Any]:
    """Train the recipe, or return its record."""
    out, steps = bench.work / f"{bench.name}_clipkit_seed{seed}", round(length * bench.config.steps)
    command = [
        *("torchrun", "train.py", bench.corpus.config, f"data.train={bench.shards}"),
        *(f"eval.data={json.dumps([*bench.corpus.targets])}", f"eval.every_steps={bench.every}"),
        *(f"steps={steps}", f"seed={seed}", f"out={out}"),
    ]
    facts = {"command": shlex.join(command), "seed": seed, "settings": to_toml(bench.config)}
    path = bench.records / f"clipkit_x{length:g}_seed{seed}.json"
    if (known := recorded(path, facts, bench.corpus.targets)) is not None:
        return known
    shutil.rmtree(out, ignore_errors=True)
    cache = ROOT / bench.work / "cache"
    shutil.rmtree(cache, ignore_errors=True)  # with the index of the shards
    cache.mkdir(parents=True)
    for name in bench.corpus.targets:
        folder = built_in(name)
        (cache / folder.name).symlink_to(folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    lines = timed([*torchrun, *command[1:]], path.with_suffix(".log"), {"CLIPKIT_CACHE": str(cache)})
    scores: dict[int, dict[str, float]] = {}
    seconds: dict[int, dict[str, float]] = {}
    for score in map(json.loads, (out / "results.jsonl").read_text().splitlines()):
        seconds.setdefault(score["step"], {})[f"{score['dataset']} {score['task']}"] = score["seconds"]
        if (score["task"], score["metric"]) == ("zero-shot", "acc1"):
            scores.setdefault(score["step"], {})[score["dataset"]] = score["value"]
    at: dict[int, float] = {}
    for second, line in lines:  # the line of the last dataset overwrites those of the others
        if found := re.match(r"step (\d+) \S+ zero-shot acc1 ", line):
            at[int(found[1])] = second
    curve = [{"step": step, "seconds": at[step], "scores": one} for step, one in scores.items()]
    facts |= {"evaluation_seconds": statistics.median(sum(one.values()) for one in seconds.values())}
    return record(path, {**facts, "seconds": lines[-1][0], "curve": curve}, bench.corpus.targets)


def trained_by_open_clip(bench: Bench, rate: float, length: int, seed: int) -> dict[str, Any]:
    """Train with open_clip's trainer and score its checkpoints, or return the record."""
    config, name = bench.config, f"{bench.name}_open_clip_lr{rate:g}_x{length}_seed{seed}"
    model_config, preprocess = peer_model(config)
    model = f"{bench.name}-{config.model.name}"  # with "vit": open_clip's default moments depend on it
    shape = bench.work / f"{model}.json"
    shape.write_text(json.dumps(model_config, indent=2) + "\n")
    checkpoints = -(-config.steps * length // bench.every)
    precision = "amp_bf16" if computes_in_bf16(config.precision, torch.device("cpu")) else "fp32"
    flags = [
        *("--model", model, "--train-data", bench.shards, "--dataset-type", "webdataset"),
        *("--train-num-samples", str(bench.every * config.batch_size), "--epochs", str(checkpoints)),
        *("--batch-size", str(config.batch_size), "--workers", str(max(1, config.data.workers))),
        *("--lr", str(rate), "--precision", precision, "--grad-clip-norm", str(config.optim.clip_norm)),
        *("--device", "cpu", "--seed", str(seed), "--logs", str(bench.work), "--name", name),
        *bench.corpus.flags,
    ]
    facts = {
        "command": shlex.join(["python", "-m", "open_clip_train.main", *flags]), "rate": rate, "length": length,
        "seed": seed, "model": model_config, "packages": PACKAGES,
    }  # fmt: skip
    path = bench.records / f"open_clip_lr{rate:g}_x{length}_seed{seed}.json"
    if (known := recorded(path, facts, bench.corpus.targets)) is not None:
        return known
    out = bench.work / name
    shutil.rmtree(out, ignore_errors=True)
    started = time.time()
    command = [sys.executable, "-c", PEER, str(shape), *flags]
    lines = timed(command, path.with_suffix(".log"), {"PYTHONPATH": str(bench.work / "packages")})
    curve = []
    for number in range(1, checkpoints + 1):
        checkpoint = out / "checkpoints" / f"epoch_{number}.pt"
        seconds = checkpoint.stat().st_mtime - started + number * bench.seconds
        folder = checkpoint.with_suffix("")
        folder.mkdir()
        configuration = {"model_cfg": model_config, "preprocess_cfg": preprocess}
        (folder / "open_clip_config.json").write_text(json.dumps(configuration))
        tensors = torch.load(checkpoint, weights_only=True, map_location="cpu")["state_dict"]
        save_file(tensors, folder / "open_clip_model.safetensors")
        scores = scored(folder, [*bench.corpus.targets], config.eval.batch_size)
        shutil.rmtree(folder)
        curve.append({"step": number * bench.every, "seconds": seconds, "scores": scores})
        checkpoint.unlink()  # with its optimizer state
        print(f"step {number * bench.every}", *(f"{one} {value:.1%}" for one, value in scores.items()))
    facts |= {"evaluation_seconds": bench.seconds}
    return record(path, {**facts, "seconds": lines[-1][0], "curve": curve}, bench.corpus.targets)


def peer_model(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return open_clip's configuration of the model that clipkit trains, and of the preprocessing."""
    shape = shape_of(config.model, config.loss, config.small, terms=select_terms(config), sizes=config.shape)
    # to_open_clip refuses towers of timm at another size, because not all of them accept it
    model = replace(config.model, image_size=0, image_options="")
    plain = shape_of(model, config.loss, config.small, sizes=config.shape)
    found = to_open_clip(plain)
    found["vision_cfg"]["image_size"] = shape.vision.image_size
    preprocess = Preprocess(image_size=shape.vision.image_size).to_dict()
    preprocess["size"] = preprocess.pop("image_size")
    return found, preprocess


def scored(model: Path, datasets: Sequence[str], batch_size: int) -> dict[str, float]:
    """Return the zero-shot accuracy of a model by dataset."""
    loaded, found = clipkit.load(model), {}
    for dataset in open_datasets(datasets):
        scores = evaluate(loaded, dataset, tasks=["zero-shot"], batch_size=batch_size)
        found[dataset.name] = next(score.value for score in scores if score.metric == "acc1")
    return found


def timed(command: Sequence[str], log: Path, environment: dict[str, str]) -> list[tuple[float, str]]:
    """Run a command; return its lines of output with the seconds since its start, which are also the log.

    Paths in the repository and the environment are relative, so that records do not depend on the machine.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = [environment.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    lines: list[tuple[float, str]] = []
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with log.open("w", encoding="utf-8") as file:
        for line in process.stdout:
            line = line.rstrip().replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", "")
            lines.append((round(time.monotonic() - began, 2), line))
            file.write(f"{lines[-1][0]:9.2f}  {lines[-1][1]}\n")
            file.flush()
    if process.wait():
        sys.exit(f"error: a training ended with status {process.returncode}; see {log}")
    return [*lines, (round(time.monotonic() - began, 2), "")]


def recorded(path: Path, facts: dict[str, Any], targets: dict[str, float]) -> dict[str, Any] | None:
    """Return the record of a run with the same facts, if there is one."""
    if path.is_file():
        known: dict[str, Any] = json.loads(path.read_text())
        if json.loads(json.dumps(facts)).items() <= known.items():
            print(f"recorded: {path.relative_to(RESULTS)}")
            return {**known, "reached": reached(known["curve"], targets)}
    return None


def reached(curve: Sequence[dict[str, Any]], targets: dict[str, float]) -> float | None:
    """Return the seconds until an evaluation reaches all targets; None if none does."""
    for one in curve:
        if all(one["scores"][name] >= target for name, target in targets.items()):
            return float(one["seconds"])
    return None


def record(path: Path, facts: dict[str, Any], targets: dict[str, float]) -> dict[str, Any]:
    """Write a record and return it, with the seconds until the targets were reached."""
    facts |= {
        "date": date.today().isoformat(),
        "commit": describe_commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}},
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_after": os.getloadavg(),
        "targets": targets,
        "reached": reached(facts["curve"], targets),
    }
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def describe_commit() -> str:
    """Return the abbreviated commit, followed by ``-dirty`` if files other than results differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{commit}-dirty" if changes else commit


def compute_ratios(own: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]]) -> list[float]:
    """Return how many times as fast clipkit is, for each seed with which both reached the targets."""
    return [
        theirs["reached"] / ours["reached"]
        for ours, theirs in zip(own, peer, strict=True)
        if ours["reached"] and theirs["reached"]
    ]


def add_row(
    corpus: str, own: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]], note: str
) -> dict[str, Any]:
    """Add a row to the table of all measurements; it replaces the row of the same corpus and commit.

    Seconds are listed by seed, None where the targets were not reached. The ratio is the median over seeds. Without
    a note, the note of the earlier row remains.
    """
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    commit = own[0]["commit"]
    ratios = compute_ratios(own, peer)
    earlier = [row for row in rows if (row["corpus"], row["commit"]) == (corpus, commit)]
    row = {
        "date": own[0]["date"],
        "corpus": corpus,
        "commit": commit,
        "open_clip_commit": peer[0]["commit"],
        "clipkit_seconds": [run["reached"] for run in own],
        "open_clip_seconds": [run["reached"] for run in peer],
        "ratio": statistics.median(ratios) if ratios else None,
        "note": note or (earlier[0]["note"] if earlier else ""),
    }
    rows = [*(row for row in rows if row not in earlier), row]
    ROWS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return row


def format_row(row: dict[str, Any]) -> str:
    """Format a row of the table of all measurements as a line of Markdown."""

    def join_seconds(seconds: Sequence[float | None]) -> str:
        return ", ".join("not reached" if second is None else f"{second:.0f}" for second in seconds)

    cells = [
        row["date"],
        row["corpus"],
        row["commit"],
        join_seconds(row["clipkit_seconds"]),
        join_seconds(row["open_clip_seconds"]),
        "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        row["note"],
    ]
    return f"| {' | '.join(cells)} |"


def report(
    bench: Bench,
    own: Sequence[dict[str, Any]],
    peer: Sequence[dict[str, Any]],
    own_tried: Sequence[dict[str, Any]],
    tried: Sequence[dict[str, Any]],
    out: Path,
) -> None:
    """Print the result and add it to the results file."""
    ratios = compute_ratios(own, peer)

    def runs(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        keys = ("seed", "rate", "length", "reached", "seconds", "evaluation_seconds")
        shown = [{key: record[key] for key in keys if key in record} for record in records]
        return [
            {**row, "last": record["curve"][-1]["scores"]} for row, record in zip(shown, records, strict=True)
        ]

    results = json.loads(out.read_text()) if out.is_file() else {}
    results[bench.name] = {
        "targets": bench.corpus.targets,
        "steps": bench.config.steps,
        "every": bench.every,
        "clipkit": runs(own),
        "clipkit_tried": runs(own_tried),
        "open_clip": runs(peer),
        "open_clip_tried": runs(tried),
        "ratio_by_seed": ratios,
        "ratio": statistics.median(ratios) if ratios else None,
    }
    out.write_text(json.dumps(results, indent=2) + "\n")
    goal = ", ".join(f"{name} {value:.0%}" for name, value in bench.corpus.targets.items())
    for who, records in (("clipkit", own), ("open_clip", peer)):
        times = (f"{record['reached']:.0f} s" if record["reached"] else "not reached" for record in records)
        print(f"{who}: {goal} after {', '.join(times)}")
    if ratios:
        print(f"clipkit is {statistics.median(ratios):.2f} times as fast")


if __name__ == "__main__":
    main()
