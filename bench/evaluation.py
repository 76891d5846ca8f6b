"""Compare the cost of evaluation with CLIP_benchmark on the same machine, and count repeated encoding.

    python -m bench.evaluation [--only classifier three_tasks counted memory] [--images 600] [--rounds 1]

    classifier   a zero-shot classifier of ImageNet's names in OpenAI's 80 templates, including tokenization,
                 with different classes in every round. Bound: the time of the matrix products of a text
                 tower's block for the same number of tokens
    three_tasks  zero-shot, linear probe and retrieval on one dataset, as complete commands: one of clipkit,
                 three of CLIP_benchmark, each with and without the time of its imports
    counted      images and prompts encoded for five datasets that share classes or images
    memory       the metrics of 1,000,000 images in 1,000 classes, and retrieval among 100,000 pairs, computed
                 by the tasks on synthetic features that are memory-mapped from disk

Both sides use the same random weights in float32 and alternate; ratios are medians over rounds.
CLIP_benchmark runs with its defaults (batch size 64, a linear probe of 10 epochs) with four exceptions:
float32 (``--no_amp``; its default on a CPU is bfloat16), R@1, R@5 and R@10, as many workers as cores, and a
patch that runs its linear probe on a CPU.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TQDM_DISABLE", "1")

import torch

import clipkit
from bench.evaluation_data import FAMILY, publish, publish_family, templates, tiny_twins
from clipkit.model.measure import text_flops

RESULTS = Path(__file__).parent / "results"
PARTS = ("classifier", "three_tasks", "counted", "memory")
TASKS = {
    "zero-shot": "zeroshot_classification",
    "linear-probe": "linear_probe",
    "retrieval": "zeroshot_retrieval",
}
SIDES = ("clipkit", "clip_benchmark")
Row = dict[str, Any]


def alternating(rounds: int, sides: dict[str, Callable[[int], object]]) -> Row:
    """Measure both sides in every round, and the ratio of their times.

    CPU seconds of all processes are also measured: they are more reliable on a machine with other load.
    """
    taken: dict[str, Row] = {side: {"seconds": [], "CPU seconds": []} for side in sides}
    for i in range(rounds):
        for side in sorted(sides, reverse=bool(i % 2)):
            began, cpu = time.perf_counter(), cpu_seconds()
            sides[side](i)
            taken[side]["seconds"].append(time.perf_counter() - began)
            taken[side]["CPU seconds"].append(cpu_seconds() - cpu)
        took = ", ".join(f"{side} {times['seconds'][-1]:.1f} s" for side, times in taken.items())
        print(f"round {i + 1}: {took}, load {os.getloadavg()[0]:.1f}", flush=True)
    own, reference = (taken[side] for side in SIDES)
    of_cpu = ratios(own["CPU seconds"], reference["CPU seconds"])
    return {**taken, **ratios(own["seconds"], reference["seconds"]), "CPU": of_cpu}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished child processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def ratios(own: Sequence[float], reference: Sequence[float]) -> Row:
    """Return median, lowest and highest ratio of the reference's time to clipkit's."""
    each = [b / a for a, b in zip(own, reference, strict=True)]
    return {"ratio": statistics.median(each), "least": min(each), "greatest": max(each)}


def clip_benchmark() -> Any:
    """Return CLIP_benchmark's command-line module, patched for NumPy 2.4 and to run its linear probe on a CPU."""
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
    cli.zeroshot_classification.float = lambda value: value.item()
    return cli


def classifier(options: argparse.Namespace) -> Row:
    """Measure the time to build a zero-shot classifier."""
    import open_clip

    from eval import Encoder

    cli = clip_benchmark()
    own = clipkit.create(options.model, seed=0).eval()
    reference = open_clip.create_model(options.model).eval()
    reference.load_state_dict(own.state_dict())
    tokenizer = open_clip.get_tokenizer(options.model)
    made: dict[str, torch.Tensor] = {}

    def names(round_index: int) -> list[str]:
        start = 100 + round_index * options.classes
        return list(open_clip.IMAGENET_CLASSNAMES[start : start + options.classes])

    def build(round_index: int) -> None:
        prompts = [
            [template.replace("{c}", name) for template in templates(80)] for name in names(round_index)
        ]
        made["clipkit"] = Encoder(own).classifier(prompts, description="the classes")

    def other(round_index: int) -> None:
        make = cli.zeroshot_classification.zero_shot_classifier
        made["clip_benchmark"] = make(
            reference, tokenizer, names(round_index), templates(80), "cpu", amp=False
        )

    with torch.inference_mode():  # one-time initialization
        reference.encode_text(tokenizer(["warm"])), clipkit.encode_text(["warm"], own)
    times = alternating(options.rounds + 2, {"clipkit": build, "clip_benchmark": other})
    prompts = options.classes * 80
    for side in SIDES:
        times[side]["prompts a second"] = prompts / statistics.median(times[side]["seconds"])
    times["difference of the last classifiers"] = float(
        (made["clipkit"] - made["clip_benchmark"]).abs().max()
    )
    new = [template.replace("{c}", name) for template in templates(80) for name in names(options.rounds + 2)]
    return {
        "classes": options.classes,
        "prompts": prompts,
        **times,
        **bound(own, new, times["clipkit"]["seconds"][-1]),
    }


def bound(model: clipkit.CLIP, prompts: list[str], seconds: float) -> Row:
    """Return the fractions of clipkit's time in matrix products and in tokenizing unseen prompts."""
    shape = model.architecture
    _, text = shape.get_plain_towers()
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
    by_length = {length: text_flops(model, length).forward for length in {77, *lengths.tolist()}}
    flops = sum(by_length[length] for length in lengths.tolist())
    return {
        "tokens a prompt": float(lengths.float().mean()),
        "share of matrix products": products / seconds,
        "share of tokenizing": tokenizing / seconds,
        "useful GFLOP/s": flops / seconds / 1e9,
        "useful FLOPs of all at 77 tokens": flops / (len(prompts) * by_length[77]),
    }


@dataclass
class Commands:
    """The commands of both sides for three tasks, and their results.

    Attributes:
        place: folder with weights and datasets.
        model: name of the architecture.
        inner: seconds of each round without imports, by side.
        scores: scores of the last round, by side.
    """

    place: Path
    model: str
    inner: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    scores: dict[str, Row] = field(default_factory=lambda: {side: {} for side in SIDES})

    def run_clipkit(self, round_index: int) -> None:
        """Run one command with a separate cache."""
        self.inner["clipkit"].append(0)
        out = self.place / f"{round_index}.jsonl"
        given = {"--model": self.weights, "--name": self.model, "--data": self.place / "set", "--out": out}
        self._run("clipkit", round_index, "run", given, [part for task in TASKS for part in ("--task", task)])
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        self.scores["clipkit"] = {f"{line['task']} {line['metric']}": line["value"] for line in lines}

    def run_reference(self, round_index: int) -> None:
        """Run three commands."""
        self.inner["clip_benchmark"].append(0)
        for kind, task in TASKS.items():
            out = self.place / f"{round_index} {kind}.json"
            given = {
                "--model": self.model,
                "--pretrained": self.weights,
                "--dataset": "wds/set",
                "--dataset_root": self.place / ("captions" if kind == "retrieval" else "set"),
                "--task": task,
                "--feature_root": self.place / f"features {round_index}",
                "--num_workers": os.cpu_count() or 1,
                "--output": out,
            }
            plain = ["--no_amp", "--quiet", "--recall_k", "1", "5", "10"]
            self._run("clip_benchmark", round_index, "eval", given, plain)
            metrics = json.loads(out.read_text())["metrics"]
            self.scores["clip_benchmark"] |= {f"{kind} {name}": value for name, value in metrics.items()}

    @property
    def weights(self) -> Path:
        return self.place / "weights.safetensors"

    def _run(self, side: str, round_index: int, what: str, given: dict[str, Any], more: list[str]) -> None:
        arguments = [what, *(str(part) for pair in given.items() for part in pair), *more]
        command = [sys.executable, "-m", "bench.evaluation", "--side", side, *arguments]
        cache = {"CLIPKIT_CACHE": str(self.place / f"cache {round_index}")}
        done = subprocess.run(command, env={**os.environ, **cache}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        self.inner[side][round_index] += float(done.stdout.splitlines()[-1])


def three_tasks(options: argparse.Namespace) -> Row:
    """Measure the time of all commands, and compare the scores of both sides for the same model."""
    import open_clip
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="clipkit-bench-") as scratch:
        commands = Commands(place=Path(scratch), model=options.model)
        torch.manual_seed(0)
        save_file(open_clip.create_model(options.model).state_dict(), commands.weights)
        sizes = publish(Path(scratch), options.images)
        times = alternating(
            options.rounds, {"clipkit": commands.run_clipkit, "clip_benchmark": commands.run_reference}
        )
    inner = commands.inner
    without = {"seconds": inner, **ratios(inner["clipkit"], inner["clip_benchmark"])}
    return {**sizes, **times, "without imports": without, "scores": commands.scores}


def one_side(side: str, arguments: list[str]) -> None:
    """Run one command; the last line printed is its duration in seconds without imports."""
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
    """Count images and texts encoded by each side, and how many are distinct."""
    from torch.utils.data import DataLoader

    import eval.run
    from eval import Encoder
    from eval.datasets.targets import find_targets

    cli = clip_benchmark()
    own, reference, transform, tokenizer = tiny_twins()
    counts = {side: {"images": 0, "texts": 0} for side in SIDES}

    class Counting(torch.nn.Module):
        def encode_image(self, images: torch.Tensor) -> torch.Tensor:
            counts["clip_benchmark"]["images"] += len(images)
            return reference.encode_image(images)  # type: ignore[no-any-return]

        def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
            counts["clip_benchmark"]["texts"] += len(tokens)
            return reference.encode_text(tokens)  # type: ignore[no-any-return]

    with tempfile.TemporaryDirectory(prefix="clipkit-bench-") as scratch:
        different = publish_family(Path(scratch))
        encoders: list[Encoder] = []

        def encoder(*given: Any, **options: Any) -> Any:
            encoders.append(Encoder(*given, **options))
            return encoders[-1]

        results = eval.run.Results()
        with patch("eval.run.Encoder", encoder), patch.dict(os.environ, CLIPKIT_CACHE=scratch):
            targets = find_targets([str(Path(scratch) / name) for name in FAMILY])
            eval.run.run_model(
                own, targets, out=Path(scratch) / "out.jsonl", tasks=["zero-shot"], results=results
            )
        assert not results.errors and len({score.dataset for score in results.scores}) == len(FAMILY)
        counts["clipkit"] = dict(encoders[0].encoded)
        for name in FAMILY:
            dataset = cli.build_dataset("wds/x", str(Path(scratch) / name), transform, "test")
            loader = DataLoader(dataset.batched(64), batch_size=None)
            given = (loader, tokenizer, dataset.classes, dataset.templates, "cpu")
            cli.zeroshot_classification.evaluate(Counting(), *given, amp=False)
    return {"datasets": list(FAMILY), "different": different, "encoded": counts}


def memory(options: argparse.Namespace) -> Row:
    """Measure peak memory of each task in its own process."""
    wanted = {
        "zero-shot": [options.many, options.many_classes, options.dim],
        "retrieval": [options.pairs, options.pairs, options.dim],
    }
    peaks = {}
    for task, sizes in wanted.items():
        command = [sys.executable, "-m", "bench.evaluation_memory", task, *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks[task] = json.loads(done.stdout.splitlines()[-1])
        print(task, peaks[task], flush=True)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds of three_tasks; classifier runs two additional ones"
    )
    parser.add_argument("--classes", type=int, default=8, help="classes per round of classifier")
    parser.add_argument(
        "--images", type=int, default=600, help="images of three_tasks, half of them for training"
    )
    parser.add_argument("--many", type=int, default=1_000_000, help="images of memory")
    parser.add_argument("--many-classes", type=int, default=1_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=100_000)
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
    results: Row = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for part in options.only:
        print(f"\n{part}", flush=True)
        result = work[part](options)
        results[part] = {**about, **result, "load after": os.getloadavg()[0]}
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")
        if "ratio" in result:
            spread = f"({result['least']:.2f} to {result['greatest']:.2f})"
            print(f"{result['ratio']:.2f} times as fast {spread}, in CPU time {result['CPU']['ratio']:.2f}")


if __name__ == "__main__":
    main()
