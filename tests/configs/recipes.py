"""Runs the commands in the comment of a recipe of configs/domain on small made data, with small towers."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.parity import build_reference
from clipkit.model.names import to_open_clip
from tests.forked import ROOT, Forked
from tests.test_configs import header

DOMAIN = ROOT / "configs" / "domain"
SECONDS = 300
# fewer and narrower blocks of the architecture that a recipe names, and steps that take a second
SMALL = (
    "shape.image_layers=1", "shape.image_width=64", "shape.text_layers=1", "shape.text_width=64", "shape.embed=32",
)  # fmt: skip
SHORT = (
    "steps=2", "optim.warmup=1", "small.steps=0", "data.workers=0", "log.tensorboard=false", "precision=fp32",
    "recompute=0", "compile=false", "eval.data=[]",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a test makes of a recipe.

    Attributes:
        overrides: settings of the training, such as smaller towers and the place of made weights.
        scores: (task, metric) that the evaluation must compute.
        fine: text that the messages of the training must contain.
    """

    overrides: Sequence[str]
    scores: Sequence[tuple[str, str]]
    fine: Sequence[str] = ()


def run_recipe(name: str, made: Made, folder: Path, forked: Forked) -> list[dict[str, Any]]:
    """Run all commands of the file's comment in ``folder``, check the scores and return the metrics."""
    path = DOMAIN / f"{name}.toml"
    fields = header(path)
    for line in (*fields.get("pack", ()), *fields["launch"], *fields["evaluate"]):
        run_command(line, made, folder, forked)
    run = folder / "runs" / name
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 2 and metrics[-1]["bad_samples"] == 0, metrics
    assert np.isfinite(metrics[-1]["loss"])
    results = [
        json.loads(line) for file in folder.rglob("results.jsonl") for line in file.read_text().splitlines()
    ]
    scores = {(line["task"], line["metric"]): line["value"] for line in results}
    missing = set(made.scores) - set(scores)
    assert not missing, f"{missing} are not among {sorted(scores)}"
    assert all(np.isfinite(scores[score]) for score in made.scores)
    return metrics


def run_command(line: str, made: Made, folder: Path, forked: Forked) -> None:
    """Run a command line in ``folder``; training in one process and with the settings of the test."""
    words = shlex.split(line)
    if words[0] == "cp":
        shutil.copy(ROOT / words[1], folder / words[2])
        return
    if words[:2] == ["python", "-c"]:
        done = subprocess.run(line.replace("python", sys.executable, 1), shell=True, cwd=folder, check=False)
        assert done.returncode == 0, line
        return
    if "train.py" in words:
        program, arguments = "train.py", words[words.index("train.py") + 1 :]
        arguments[0] = str(ROOT / arguments[0])
        names = {setting.partition("=")[0] for setting in (*made.overrides, *SHORT)}
        arguments = [word for word in arguments if word.partition("=")[0] not in names]
        arguments += _last([*SHORT, *made.overrides])
    else:
        assert words[:2] == ["python", "-m"], line
        program, arguments = f"{words[2]}/__main__.py", words[3:]
    ended = forked.run(
        program, arguments, {"CLIPKIT_CACHE": str(folder / "cache")}, cwd=folder, timeout=SECONDS
    )
    assert ended.returncode == 0, f"{line}\n{ended.stdout[-1000:]}\n{ended.stderr[-3000:]}"
    if program == "train.py":
        for text in made.fine:
            assert text in ended.stderr, ended.stderr


def _last(settings: Sequence[str]) -> list[str]:
    return list({setting.partition("=")[0]: setting for setting in settings}.values())


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


def small_clip(folder: Path, name: str, *settings: str) -> tuple[str, ...]:
    """Write an open_clip folder of small towers with random weights, as open_clip pushes it to the hub.

    Returns the settings that select these weights and towers.
    """
    from open_clip.model import set_model_preprocess_cfg
    from open_clip.push_to_hf_hub import save_for_hf
    from open_clip.transform import PreprocessCfg

    from clipkit.config import Config, ModelConfig, ShapeConfig
    from clipkit.training.build import select_shape

    sizes: dict[str, Any] = {}
    for setting in (*SMALL, *settings):
        key, _, value = setting.partition("=")
        if key.startswith("shape."):
            sizes[key.removeprefix("shape.")] = int(value)
    shape = select_shape(Config(model=ModelConfig(name=name), shape=ShapeConfig(**sizes)))
    config = to_open_clip(shape)
    theirs = build_reference(config, seed=0)
    set_model_preprocess_cfg(theirs, {**vars(PreprocessCfg()), "size": shape.vision.image_size})
    save_for_hf(theirs, _NoTokenizer(), config, str(folder))
    return (*SMALL, *settings, f"model.name={name}", f"model.weights={folder}")


def picture(path: Path, number: int, *, size: tuple[int, int] = (40, 32), color: Sequence[int] = ()) -> Path:
    """Write an image of a color with spots that depend on a number."""
    random = np.random.default_rng(number)
    pixels = random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    if color:
        pixels = (pixels // 8 + np.array(color) * 0.8).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


WORDS = (
    "a", "the", "of", "and", "red", "blue", "green", "skin", "lesion", "photo", "figure", "field", "shows", "image",
    "melanoma", "nevus", "heart", "lung", "0", "1", "2", "3", "4",
)  # fmt: skip


def small_bert(folder: Path) -> str:
    """Write a small BERT for masked words and its tokenizer, as PubMedBERT is published: with pytorch_model.bin.

    Returns the folder as a value of ``model.text``.
    """
    import torch
    import transformers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    folder.mkdir(parents=True)
    vocabulary = [*special, *WORDS, *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary += list("abcdefghijklmnopqrstuvwxyz.,")
    vocabulary = list(dict.fromkeys(vocabulary))
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": True, "model_max_length": 512})
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=512, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = transformers.BertForMaskedLM(config)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(folder)
    torch.save(encoder.state_dict(), folder / "pytorch_model.bin")
    return f"transformers:{folder}"


def classes(folder: Path, names: Sequence[str], count: int, *, suffix: str = "png") -> None:
    """Write ``count`` images of each class in a folder of its own."""
    for label, name in enumerate(names):
        color = [(label * 83 + 40 * channel) % 256 for channel in range(3)]
        for number in range(count):
            picture(folder / name / f"{number}.{suffix}", 100 * label + number, color=color)


def csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a CSV."""
    import csv as library

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = library.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
