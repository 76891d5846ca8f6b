"""What does it cost to score a model, beside CLIP_benchmark on the same machine, and what is encoded twice?

    python -m bench.evaluation [--only classifier three_tasks counted memory] [--pictures 600] [--rounds 2]

    classifier   a zero-shot classifier of ImageNet's names in OpenAI's 80 templates, tokenization included; other
                 classes in every round. What bounds ours stands beside it: the time that the matrix products of a
                 text tower's block alone take for as many tokens
    three_tasks  zero-shot, linear probe and retrieval on one dataset, as one types them: one command of ours, three
                 of theirs, each from the start of its process to its end, and without its imports
    counted      pictures and prompts that go through the towers for five datasets which share classes or pictures
    memory       the metrics of 1,000,000 pictures of 1,000 classes, and retrieval among 100,000 pairs, by the tasks
                 themselves on made-up features that are mapped from a disk

Both have the same random weights in float32. Their sides alternate, and ratios are medians of the rounds' ratios.
CLIP_benchmark runs with its own defaults (batches of 64, a linear probe of 10 epochs) but for four things: float32
(``--no_amp``; its default on a CPU would be bfloat16), R@1, R@5 and R@10, as many workers as cores, and its linear
probe, which it refuses to run on a CPU, is told that this is a GPU.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TQDM_DISABLE", "1")

import torch

import clipkit
from bench.evaluation_data import (
    FAMILY,
    publish,
    publish_family,
    templates,
    tiny_twins,
)
from clipkit.flops import text_flops

RESULTS = Path(__file__).parent / "results"
PARTS = ("classifier", "three_tasks", "counted", "memory")
TASKS = {
    "zero-shot": "zeroshot_classification",
    "linear-probe": "linear_probe",
    "retrieval": "zeroshot_retrieval",
}
SIDES = ("clipkit", "clip_benchmark")
Row = dict[str, Any]


def alternating(rounds: int, sides: dict[str, Callable[[int], float]]) -> Row:
    """Seconds of both sides' work in every round, and the median, least and greatest ratio of theirs to ours."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            seconds[side].append(sides[side](number))
        took = ", ".join(f"{side} {times[-1]:.1f} s" for side, times in seconds.items())
        print(f"round {number + 1}: {took}, load {os.getloadavg()[0]:.1f}", flush=True)
    return {"seconds": seconds, **ratios(seconds["clipkit"], seconds["clip_benchmark"])}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """How many times as long theirs takes, over rounds."""
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(each), "least": min(each), "greatest": max(each)}


def clip_benchmark() -> Any:
    """Its command line's module, made to run here: on NumPy 2.4, and its linear probe on a CPU."""
    from clip_benchmark import cli  # type: ignore[import-untyped]

    class Cuda(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return other in ("cuda", "cpu")

    def on_cpu(*given: Any, device: str, **options: Any) -> Any:
        def here(self: Any) -> Any:
            return self

        with patch.object(torch.nn.Module, "cuda", here), patch.object(torch.Tensor, "cuda", here):
            return probe(*given, device=Cuda(device), **options)

    probe = cli.linear_probe.evaluate
    cli.linear_probe.evaluate = on_cpu
    cli.zeroshot_classification.float = lambda one: one.item()
    return cli


def classifier(options: argparse.Namespace) -> Row:
    """Seconds for so many classes a round."""
    import open_clip

    from eval import Encoder

    cli = clip_benchmark()
    ours = clipkit.create(options.model, seed=0).eval()
    theirs = open_clip.create_model(options.model).eval()
    theirs.load_state_dict(ours.state_dict())
    tokenizer = open_clip.get_tokenizer(options.model)
    made: dict[str, torch.Tensor] = {}

    def names(number: int) -> list[str]:
        start = 100 + number * options.classes
        return list(open_clip.IMAGENET_CLASSNAMES[start : start + options.classes])

    def own(number: int) -> float:
        began = time.perf_counter()
        prompts = [[template.replace("{c}", name) for template in templates(80)] for name in names(number)]
        made["clipkit"] = Encoder(ours).classifier(prompts, whose="the classes")
        return time.perf_counter() - began

    def other(number: int) -> float:
        began = time.perf_counter()
        make = cli.zeroshot_classification.zero_shot_classifier
        made["clip_benchmark"] = make(theirs, tokenizer, names(number), templates(80), "cpu", amp=False)
        return time.perf_counter() - began

    with torch.inference_mode():  # what is done once
        theirs.encode_text(tokenizer(["warm"])), clipkit.encode_text(["warm"], ours)
    found = alternating(options.rounds + 1, {"clipkit": own, "clip_benchmark": other})
    prompts = options.classes * 80
    found["prompts a second"] = {
        side: prompts / statistics.median(times) for side, times in found["seconds"].items()
    }
    found["difference of the last classifiers"] = float(
        (made["clipkit"] - made["clip_benchmark"]).abs().max()
    )
    new = [template.replace("{c}", name) for template in templates(80) for name in names(options.rounds + 1)]
    return {
        "classes": options.classes,
        "prompts": prompts,
        **found,
        **bound(ours, new, found["seconds"]["clipkit"][-1]),
    }


def bound(model: clipkit.CLIP, prompts: list[str], seconds: float) -> Row:
    """What of ours are matrix products, and what is finding the tokens of prompts that were not seen before."""
    shape = model.architecture
    _, text = shape.own_towers()
    began = time.perf_counter()
    tokens = model.tokenizer(prompts)
    tokenizing = time.perf_counter() - began
    lengths = tokens.argmax(dim=1) + 1
    rows = round(256 * float(lengths.float().mean()))
    width = text.width
    sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    made = [(torch.randn(rows, a), torch.randn(a, b)) for a, b in sizes]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for a, b in made:
            a @ b
        times.append(time.perf_counter() - began)
    products = statistics.median(times) * text.layers * len(prompts) / 256
    flops = sum(text_flops(shape, int(length)).forward for length in lengths.tolist())
    return {
        "tokens a prompt": float(lengths.float().mean()),
        "share of matrix products": products / seconds,
        "share of tokenizing": tokenizing / seconds,
        "useful GFLOP/s": flops / seconds / 1e9,
        "useful FLOPs of all at 77 tokens": flops / (len(prompts) * text_flops(shape, 77).forward),
    }


def three_tasks(options: argparse.Namespace) -> Row:
    """Seconds from the first command to the end of the last."""
    import open_clip
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        weights = place / "weights.safetensors"
        torch.manual_seed(0)
        save_file(open_clip.create_model(options.model).state_dict(), weights)
        words = publish(place, options.pictures)
        inner: dict[str, list[float]] = {side: [] for side in SIDES}
        scores: dict[str, Row] = {side: {} for side in SIDES}

        def run(side: str, number: int, arguments: list[Any]) -> float:
            """A command in a process of its own; its seconds without imports are added to the round's."""
            command = [sys.executable, "-m", "bench.evaluation", "--side", side, *map(str, arguments)]
            cache = {"CLIPKIT_CACHE": str(place / f"cache {number}")}
            began = time.perf_counter()
            done = subprocess.run(command, env={**os.environ, **cache}, capture_output=True, text=True)
            seconds = time.perf_counter() - began
            assert done.returncode == 0, done.stderr[-2000:]
            inner[side][number] += float(done.stdout.splitlines()[-1])
            return seconds

        def own(number: int) -> float:
            inner["clipkit"].append(0)
            out = place / f"{number}.jsonl"
            tasks = [part for task in TASKS for part in ("--task", task)]
            given = [
                "run",
                "--model",
                weights,
                "--name",
                options.model,
                "--data",
                place / "set",
                "--out",
                out,
            ]
            seconds = run("clipkit", number, [*given, *tasks])
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            scores["clipkit"] = {f"{line['task']} {line['metric']}": line["value"] for line in lines}
            return seconds

        def other(number: int) -> float:
            inner["clip_benchmark"].append(0)
            return sum(other_task(number, ours, theirs) for ours, theirs in TASKS.items())

        def other_task(number: int, ours: str, theirs: str) -> float:
            out = place / f"{number} {ours}.json"
            folder = place / ("captions" if ours == "retrieval" else "set")
            given = [
                "--model",
                options.model,
                "--pretrained",
                weights,
                "--dataset",
                "wds/set",
                "--output",
                out,
            ]
            given += [
                "--dataset_root",
                folder,
                "--task",
                theirs,
                "--feature_root",
                place / f"features {number}",
            ]
            plain = ["--no_amp", "--recall_k", 1, 5, 10, "--num_workers", os.cpu_count() or 1, "--quiet"]
            seconds = run("clip_benchmark", number, ["eval", *given, *plain])
            found = json.loads(out.read_text())["metrics"]
            scores["clip_benchmark"] |= {f"{ours} {name}": value for name, value in found.items()}
            return seconds

        found = alternating(options.rounds, {"clipkit": own, "clip_benchmark": other})
    without = {"seconds": inner, **ratios(inner["clipkit"], inner["clip_benchmark"])}
    return {"pictures": options.pictures, **words, **found, "without imports": without, "scores": scores}


def one_side(side: str, arguments: list[str]) -> None:
    """One command; the last line that it prints are its seconds without imports."""
    if side == "clipkit":
        from eval.__main__ import main

        began = time.perf_counter()
        assert main(arguments) == 0
    else:
        cli = clip_benchmark()
        sys.argv = ["clip_benchmark", *arguments]
        began = time.perf_counter()
        cli.main()
    print(time.perf_counter() - began)


def counted(_: argparse.Namespace) -> Row:
    """Through the towers: by us and by them, and how many different ones there are."""
    from torch.utils.data import DataLoader

    import eval.run
    from eval import Encoder
    from eval.targets import find_targets

    cli = clip_benchmark()
    ours, theirs, transform, tokenizer = tiny_twins()
    counts = {side: {"images": 0, "texts": 0} for side in SIDES}

    class Counting(torch.nn.Module):
        def encode_image(self, images: torch.Tensor) -> torch.Tensor:
            counts["clip_benchmark"]["images"] += len(images)
            return theirs.encode_image(images)  # type: ignore[no-any-return]

        def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
            counts["clip_benchmark"]["texts"] += len(tokens)
            return theirs.encode_text(tokens)  # type: ignore[no-any-return]

    with tempfile.TemporaryDirectory() as scratch:
        different = publish_family(Path(scratch))
        encoders: list[Encoder] = []

        def encoder(*given: Any, **options: Any) -> Any:
            encoders.append(Encoder(*given, **options))
            return encoders[-1]

        found = eval.run.Scored()
        with patch("eval.run.Encoder", encoder), patch.dict(os.environ, CLIPKIT_CACHE=scratch):
            targets = find_targets([str(Path(scratch) / name) for name in FAMILY])
            eval.run.run_model(
                ours, targets, out=Path(scratch) / "out.jsonl", tasks=["zero-shot"], scored=found
            )
        assert not found.trouble and len({score.dataset for score in found.scores}) == len(FAMILY)
        counts["clipkit"] = dict(encoders[0].encoded)
        for name in FAMILY:
            dataset = cli.build_dataset("wds/x", str(Path(scratch) / name), transform, "test")
            loader = DataLoader(dataset.batched(64), batch_size=None)
            given = (loader, tokenizer, dataset.classes, dataset.templates, "cpu")
            cli.zeroshot_classification.evaluate(Counting(), *given, amp=False)
    return {"datasets": list(FAMILY), "different": different, "encoded": counts}


def memory(options: argparse.Namespace) -> Row:
    """Of each task in a process of its own."""
    wanted = {
        "zero-shot": [options.many, options.many_classes, options.dim],
        "retrieval": [options.pairs, options.pairs, options.retrieval_dim],
    }
    found = {}
    for task, sizes in wanted.items():
        command = [sys.executable, "-m", "bench.evaluation_memory", task, *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found[task] = json.loads(done.stdout.splitlines()[-1])
        print(task, found[task], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--rounds", type=int, default=2, help="of three_tasks; one more of classifier")
    parser.add_argument("--classes", type=int, default=8, help="a round of classifier")
    parser.add_argument(
        "--pictures", type=int, default=600, help="of three_tasks, half of them to learn from"
    )
    parser.add_argument("--many", type=int, default=1_000_000, help="pictures of memory")
    parser.add_argument("--many-classes", type=int, default=1_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--retrieval-dim", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "evaluation.json")
    parser.add_argument("--side", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        one_side(options.side[0], options.side[1:])
        return
    about: Row = {"model": options.model, "machine": platform.machine(), "cores": os.cpu_count()}
    about |= {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load before": os.getloadavg()[0],
    }
    work = {"classifier": classifier, "three_tasks": three_tasks, "counted": counted, "memory": memory}
    kept: Row = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for part in options.only:
        print(f"\n{part}", flush=True)
        found = work[part](options)
        kept[part] = {**about, **found, "load after": os.getloadavg()[0]}
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(kept, indent=2) + "\n")
    for part in options.only:
        if "ratio" in kept[part]:
            row = kept[part]
            print(f"{part}: {row['ratio']:.2f} times ({row['least']:.2f} to {row['greatest']:.2f})")


if __name__ == "__main__":
    main()
