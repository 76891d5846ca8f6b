"""Import the scores that open_clip publishes of its models, for ``python -m eval report --beside published``.

    python -m bench.import_published REPOSITORY

REPOSITORY is a clone of github.com/mlfoundations/open_clip. A column of ``docs/openclip_results.csv`` belongs to
the dataset whose card states the same values for OpenAI's four ViTs; the card also states task, metric and prompts.
Left out are ``openclip_retrieval_results.csv``, of which ``mean_R@1`` is the mean of both R@1, and the multilingual
table, because it is not stated which captions were scored in each language. UniBench publishes its scores of 59
models as ``aggregate.f`` in the dataset haideraltahan/unibench of the Hugging Face hub, not in its repository.
"""

import argparse
import csv
import io
import json
import subprocess
from pathlib import Path

from eval.datasets.card import Published, card_names, load_card

TABLE = "docs/openclip_results.csv"
OUT = Path(__file__).parents[1] / "eval" / "report" / "published.json"


def read_git(repository: Path, *arguments: str) -> str:
    """Run git and return what it prints."""
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find_column(published: Published, models: dict[str, dict[str, str]]) -> str:
    """Return the name of the column with the scores on a card."""
    columns = set(next(iter(models.values())))
    for model, value in published.values.items():
        row = models[model.removeprefix("open_clip:")]
        columns = {name for name in columns if row[name][:2] in ("0.", "1.") and float(row[name]) == value}
    (column,) = columns
    return column


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", type=Path)
    repository = parser.parse_args().repository
    commit, date = read_git(repository, "log", "-1", "--format=%H %cs", "--", TABLE).split()
    rows = list(csv.DictReader(io.StringIO(read_git(repository, "show", f"{commit}:{TABLE}"))))
    models = {f"{row['name']}/{row['pretrained']}": row for row in rows}
    columns = []
    names = []
    for card in map(load_card, card_names()):
        for published in card.published:
            if published.source.endswith(TABLE):
                names.append(find_column(published, models))
                columns.append([card.name, published.task, published.metric, published.prompts])
    assert len(set(names)) == len(names) == 38, names
    head = {"source": f"open_clip, {TABLE}", "commit": commit, "date": date, "columns": columns}
    lines = [
        f"{json.dumps(model)}: {json.dumps([float(row[name]) for name in names])}"
        for model, row in models.items()
    ]
    text = json.dumps(head)[:-1] + ', "models": {\n' + ",\n".join(lines) + "\n}}\n"
    OUT.write_text(text, encoding="utf-8")
    print(f"wrote {OUT}: {len(models)} models, {len(columns)} datasets")


if __name__ == "__main__":
    main()
