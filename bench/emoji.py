"""Score models trained on emoji: an artist and concepts that training did not see, in each of 27 languages.

    python -m bench.emoji runs/emoji [MORE RUNS] [--data FOLDER] [--languages] [--out FILE]

Zero-shot is among all 1,914 names. With several runs of the same settings and other seeds, each has its own row.
Images are encoded once per run and split.
"""

import argparse
import json
from dataclasses import replace
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


def main() -> None:
    """Score the runs and write the rows as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="run folders or checkpoints")
    parser.add_argument(
        "--data", type=Path, help="the folder of python -m data make emoji (default: the cached one)"
    )
    parser.add_argument("--languages", action="store_true", help="score every language, not only English")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parsed = parser.parse_args()
    data = parsed.data or built_in("emoji")
    rows = [row for run in parsed.runs for row in score(run, data, languages=parsed.languages)]
    if parsed.out is not None:
        parsed.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
