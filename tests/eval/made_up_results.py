"""Synthetic results files and details of many models, generated from a seed."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eval.datasets.dataset import EvalDataset
from eval.results.details import prediction_details
from eval.results.records import Example, Guess, Thumbnail, write_details

__all__ = ["DATASETS", "EVIL", "MODELS", "PNG", "add_details", "line", "made_up", "write"]

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGNgYGD4z8AAAAMCAQABGdcNAAAAAElFTkSuQmCC"
EVIL = "<script>alert('x')</script>\"><img src=http://evil.example/x>&"
DATASETS = (
    "imagenet1k", "cifar10", "cifar100", "food101", "sun397", "cars", "fgvc_aircraft", "dtd", "pets",
    "caltech101", "flowers", "mnist", "fer2013", "stl10", "eurosat", "resisc45", "gtsrb", "kitti",
    "country211", "pcam", "ucf101", "kinetics700", "clevr_counts", "hateful_memes", "renderedsst2",
    "voc2007", "birdsnap", "imagenetv2", "imagenet_sketch", "imagenet-a", "imagenet-r", "objectnet", "svhn",
    "dmlab", "dsprites_orientation", "smallnorb_azimuth", "diabetic_retinopathy", "fmow", "iwildcam",
    "camelyon17",
)  # fmt: skip
MODELS = (
    ("open_clip:ViT-B-32/openai", "ViT-B-32", 4.4),
    ("open_clip:ViT-B-32/laion2b_s34b_b79k", "ViT-B-32", 4.4),
    ("open_clip:ViT-B-16/openai", "ViT-B-16", 17.6),
    ("open_clip:ViT-L-14/openai", "ViT-L-14", 81.1),
    ("open_clip:ViT-L-14-336/openai", "ViT-L-14-336", 191.1),
    ("open_clip:ViT-H-14/laion2b_s32b_b79k", "ViT-H-14", 167.4),
    ("open_clip:RN50/openai", "RN50", 9.1),
    ("open_clip:RN101/openai", "RN101", 12.8),
    ("open_clip:ViT-B-16/datacomp_xl_s13b_b90k", "ViT-B-16", 17.6),
    ("open_clip:ViT-L-14/datacomp_xl_s13b_b90k", "ViT-L-14", 81.1),
    ("runs/quickstart", "ViT-Ti-4-32", 0.35),
    ("runs/glyphs", "ViT-S-4-32", 1.1),
)


def line(model: int, dataset: str, metric: str, value: float, **more: Any) -> dict[str, Any]:
    name, architecture, gflops = MODELS[model % len(MODELS)]
    name += f" {model}" * (model >= len(MODELS))
    score = {
        "task": "zero-shot",
        "prompt_set": "openai",
        "setting": "",
        "n": 5000,
        "chance": 0.01,
        "seconds": 1.5,
    }
    score |= {"low": max(0.0, value - 0.013), "high": min(1.0, value + 0.013)}
    origin = {
        "model": name,
        "weights": f"sha256:{model:016x}",
        "architecture": architecture,
        "gflops": gflops,
    }
    origin |= {
        "data_revision": dataset[:4],
        "prompts": dataset[:3],
        "dtype": "float32",
        "clipkit": "0.1",
        "torch": "2.15.0",
    }
    return {
        "step": None,
        "dataset": dataset,
        "split": "test",
        **score,
        "metric": metric,
        "value": value,
        **origin,
        **more,
    }


def made_up(
    models: int, datasets: Sequence[str], *, tasks: Sequence[str] = ("zero-shot",), missing: float = 0.0
) -> list[dict[str, Any]]:
    """Return synthetic lines of a results file, generated from a seed."""
    rng = random.Random(0)
    ease = {dataset: rng.uniform(-1.5, 2.0) for dataset in datasets}
    lines = []
    for i in range(models):
        skill = math.log(MODELS[i % len(MODELS)][2]) / 4 + rng.gauss(0, 0.15)
        for dataset in datasets:
            if rng.random() < missing:
                continue

            def share(offset: float, dataset: str = dataset, skill: float = skill) -> float:
                return 1 / (1 + math.exp(-(ease[dataset] + skill + offset + rng.gauss(0, 0.2))))

            first = share(-0.5)
            values = (("acc1", first), ("acc5", (first + 2) / 3), ("mean_per_class_recall", first * 0.98))
            lines += [line(i, dataset, metric, value) for metric, value in values]
            for task in tasks[1:]:
                if task == "few-shot":
                    for k in (1, 2, 4, 8, 16):
                        setting, base = f"{k}-shot", share(-1.2 + 0.45 * math.log2(k))
                        lines.append(
                            line(i, dataset, "acc1", base, task=task, setting=setting, prompt_set="")
                        )
                elif task == "layers":
                    for layer in range(1, 13):
                        more = {"task": "linear-probe", "setting": f"layer {layer}", "prompt_set": ""}
                        lines.append(line(i, dataset, "acc1", share(-1.5 + layer / 6), **more))
                else:
                    lines.append(line(i, dataset, "acc1", share(0.6), task=task, prompt_set=""))
    return lines


def add_details(
    results: Path,
    models: int,
    datasets: Sequence[str],
    *,
    classes: int = 10,
    images: Sequence[str] = (PNG,),
) -> None:
    """Write synthetic details; about two thirds of the predictions are right."""
    for i in range(models):
        for number, dataset in enumerate(datasets):
            torch.manual_seed(number)
            labels = torch.randint(classes, (600,))
            torch.manual_seed(100 * i + number)
            guess = torch.where(
                torch.rand(600) < 0.66, labels, (labels + torch.randint(classes, (600,)) ** 2) % classes
            )
            names = tuple(
                f"{('golden', 'small', 'old')[j % 3]} {dataset[:6]} no. {j}" for j in range(classes)
            )
            data = EvalDataset(
                name=dataset, class_names=names, templates=("{c}",), images=(), labels=labels, captions=None,  # type: ignore[arg-type]
                revision=dataset[:4], tasks=("zero-shot",), prompt_set="openai",
            )  # fmt: skip
            details = prediction_details(data, guess, task="zero-shot", confidence=torch.rand(600) ** 0.5)
            examples = []
            for j in range(6):
                order = [int(guess[j]), *(k for k in range(classes) if k != int(guess[j]))][:5]
                guesses = tuple(
                    Guess(label=names[k], probability=0.6 / 2**p, right=k == int(labels[j]))
                    for p, k in enumerate(order)
                )
                examples.append(
                    Example(
                        picture=str(j),
                        guesses=guesses,
                        truth=names[int(labels[j])],
                        rank=1 + 6 * (not guesses[0].right),
                        probability=0.01,
                    )
                )
            shown = {
                str(j): Thumbnail(png=images[(j + number) % len(images)], alt="an image") for j in range(6)
            }
            fields = {**vars(details), "examples": tuple(examples), "pictures": shown}
            write_details(results, type(details)(**fields), weights=f"sha256:{i:016x}")


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
