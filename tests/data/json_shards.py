"""Shards of samples with a caption file and a json, for tests of what counts by their fields."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import webdataset

from data.remote.store import ShardFile


def shard_of(path: Path, samples: Sequence[dict[str, Any]]) -> ShardFile:
    """A shard of samples that have a picture, and what is given besides."""
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number, sample in enumerate(samples):
            members = {
                extension: value if isinstance(value, bytes) else value.encode()
                for extension, value in sample.items()
            }
            tar.write({"__key__": f"{number:03d}", "jpg": b"picture", **members})
    return ShardFile.at(path)


def of_json(*metas: Any) -> list[dict[str, Any]]:
    """Samples with a caption file and a json."""
    return [{"txt": "text", "json": json.dumps(meta)} for meta in metas]
