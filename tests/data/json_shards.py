"""Shards of samples with caption file and json, for tests of field names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import webdataset

from clipkit.samples.remote.store import ShardFile


def shard_of(path: Path, samples: Sequence[dict[str, Any]]) -> ShardFile:
    """Write a shard of samples with an image and the given members."""
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number, sample in enumerate(samples):
            members = {
                extension: value if isinstance(value, bytes) else value.encode()
                for extension, value in sample.items()
            }
            tar.write({"__key__": f"{number:03d}", "jpg": b"image", **members})
    return ShardFile.at(path)


def of_json(*metas: Any) -> list[dict[str, Any]]:
    """Return samples with a caption file and a json."""
    return [{"txt": "text", "json": json.dumps(meta)} for meta in metas]
