"""``clipkit caption``: describe images, as a table on the terminal or as a CSV or JSON Lines file.

    .csv      one row per image: image, source, caption; cells that a spreadsheet would evaluate as formulas are
              prefixed with an apostrophe
    .jsonl    one object per line: {"image": …, "source": …, "caption": …}

Images are streamed. With an output file, results are first appended to ``.NAME.partial``, a few batches at a time:
its first line has the settings, each other line an image. The same command resumes there. A complete file is not
replaced.
"""

import csv
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from clipkit.errors import ConfigError, DataError
from clipkit.files.terminal import CountProgress, counted, printable
from clipkit.files.writing import lock_output, replacing
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.inputs import Item, Stream, recorded_members
from clipkit.inference.stream import PRECISIONS, Failure, FeatureStream
from clipkit.model.generate import check_generation, generate_captions
from clipkit.options import CaptionOptions
from clipkit.samples.table import safe_cell

_GENERATION = ("beams", "top_p", "prefix", "length")
_BLOCK = 4  # batches that are appended to the output at a time
_WIDTH = 80


def caption_images(
    items: Iterable[Item], features: FeatureStream, *, first: int = 0, **generation: Any
) -> Iterator[dict[str, str]]:
    """Describe images, a few batches at a time.

    Args:
        features: the model, and how images are read.
        first: number of the first image, which selects the random numbers of ``top_p``.
        generation: arguments of ``clipkit.caption``.

    Yields:
        for each image in order its name "image", its "source", and "caption", or "error" if it cannot be read.
    """
    dtype = PRECISIONS[features.precision]
    autocast = torch.autocast(features.device.type, dtype or torch.bfloat16, enabled=dtype is not None)
    remaining = iter(items)
    while block := list(islice(remaining, _BLOCK * features.batch_size)):
        numbers = {id(item): i for i, item in enumerate(block, first)}
        outcomes: dict[int, tuple[str, str]] = {}
        for outcome in features.pixel_batches(block):
            if isinstance(outcome, Failure):
                outcomes[id(outcome.item)] = "error", outcome.cause
                continue
            batch, pixels = outcome
            rows = [numbers[id(item)] for item in batch]
            try:
                with autocast:
                    captions = generate_captions(features.model, pixels, rows=rows, **generation)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"out of memory with --batch-size {features.batch_size}: use a smaller batch size"
                ) from error
            outcomes |= {id(item): ("caption", text) for item, text in zip(batch, captions, strict=True)}
        for item in block:
            name, text = outcomes[id(item)]
            yield {"image": item.key, "source": item.source, name: text}
        first += len(block)


def run_caption(options: CaptionOptions) -> int:
    """Run the command and return its exit status: 0 if at least one image was described."""
    if options.seed is not None and not options.top_p:
        raise ConfigError("--seed has no effect without --top-p")
    stream = Stream(
        options.sources, image=options.image or options.image_column or "", cache_gb=options.cache_gb
    )
    generation = {name: getattr(options, name) for name in _GENERATION} | {"seed": options.seed or 0}
    out = options.out
    if out is not None and (out.suffix.lower() not in (".csv", ".jsonl") or out.is_dir()):
        raise ConfigError(f"--out {out} must be a file name ending in .csv or .jsonl")
    if out is not None and out.exists() and not _partial_path(out).exists():
        raise ConfigError(f"--out {out} is complete already: name another file, or remove it first")
    features = FeatureStream.from_options(options)
    stream.recorded = recorded_members(features.model.origin)
    check_generation(features.model, **{name: value for name, value in generation.items() if name != "seed"})
    if out is None:
        done, failed = _print_table(caption_images(stream, features, **generation))
    else:
        try:
            done, failed = _write(out, stream, features, generation)
        except OSError as error:
            raise DataError(f"cannot write {out}: {error.strerror or error}") from error
    for line in features.lines(options):
        print(line, file=sys.stderr)
    for note in stream.notes:
        print(note, file=sys.stderr)
    if failed:
        print(f"{failed:,} of {counted(done + failed, 'image')} failed", file=sys.stderr)
    if out is not None:
        print(f"wrote {counted(done, 'caption')} to {out}")
    return 0 if done else 1


def _print_table(records: Iterator[dict[str, str]]) -> tuple[int, int]:
    done = failed = 0
    for record in records:
        if _print_failure(record):
            failed += 1
            continue
        done += 1
        caption = textwrap.wrap(printable(record["caption"]) or "(empty)", _WIDTH - 2)
        print(printable(record["image"]), *(f"  {line}" for line in caption), sep="\n", flush=True)
    return done, failed


def _print_failure(record: dict[str, str]) -> bool:
    if "error" not in record:
        return False
    where = f" (in {record['source']})" if record["source"] not in record["image"] else ""
    print(f"failed: {printable(record['image'] + where)}: {record['error']}", file=sys.stderr)
    return True


def _write(out: Path, stream: Stream, features: FeatureStream, generation: dict[str, Any]) -> tuple[int, int]:
    partial = _partial_path(out)
    with lock_output(out, "clipkit caption"):
        settings = json.dumps(
            {
                "model": model_hash(features.model),
                "precision": features.precision,
                "batch_size": features.batch_size,
                **generation,
            }
        )
        count = _resumable(partial, settings, stream, _BLOCK * features.batch_size)
        if count:
            print(f"resuming after {counted(count, 'image')} in {partial}", file=sys.stderr)
        with (
            partial.open("a", encoding="utf-8") as file,
            CountProgress("captions", total=None, shown=True) as bar,
        ):
            if not count:
                file.write(settings + "\n")
            failed = 0
            block = []
            described = caption_images(islice(stream, count, None), features, first=count, **generation)
            for described_count, record in enumerate(described, count + 1):
                failed += _print_failure(record)
                block.append(json.dumps(record, ensure_ascii=False))
                if described_count % (_BLOCK * features.batch_size) == 0:
                    file.write("".join(f"{line}\n" for line in block))
                    file.flush()
                    block.clear()
                bar.show(described_count, failed)
            file.write("".join(f"{line}\n" for line in block))
        done, failed = _convert(partial, out)
        partial.unlink()
        return done, failed


def _partial_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _resumable(partial: Path, settings: str, stream: Stream, block: int) -> int:
    """Cut a partial file to whole blocks and return its number of images; remove it if it cannot be resumed."""
    if not partial.exists():
        return 0
    count = 0
    end = 0
    with partial.open("rb") as file:
        same = file.readline() == f"{settings}\n".encode()
        end = file.tell()
        for item, line in zip(stream, file, strict=False):
            try:
                record = json.loads(line)
            except ValueError:  # cut by kill -9
                break
            if not same or (record["image"], record["source"]) != (item.key, item.source):
                same = False
                break
            count += 1
            if count % block == 0:
                end = file.tell()
    count -= count % block
    if not same or not count:
        if not same:
            print(f"{partial} has other settings or images: starting again", file=sys.stderr)
        partial.unlink()
        return 0
    os.truncate(partial, end)
    return count


def _convert(partial: Path, out: Path) -> tuple[int, int]:
    done = failed = 0
    with (
        partial.open(encoding="utf-8") as lines,
        replacing(out) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        table = csv.writer(file, lineterminator="\n") if out.suffix.lower() == ".csv" else None
        if table is not None:
            table.writerow(("image", "source", "caption"))
        for line in islice(lines, 1, None):
            record = json.loads(line)
            if "error" in record:
                failed += 1
                continue
            done += 1
            if table is None:
                file.write(line)
            else:
                table.writerow([safe_cell(record[name]) for name in ("image", "source", "caption")])
    return done, failed
