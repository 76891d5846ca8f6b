"""Files in stores (s3://, gs://, https://, hf://) and their cache on this machine."""

from clipkit.samples.remote.cache import ShardCache, cache_folder, created_once, index_folder, shard_cache
from clipkit.samples.remote.store import (
    ShardFile,
    describe_files,
    download_all,
    is_remote,
    list_entries,
    list_folder,
    read_range,
    read_text,
)
from clipkit.samples.remote.transfer import CLIENT_OPTIONS, HUB_FORM, Unreachable, encode_url

__all__ = [
    "CLIENT_OPTIONS", "HUB_FORM", "ShardCache", "ShardFile", "Unreachable", "cache_folder", "created_once",
    "describe_files", "download_all", "encode_url", "index_folder", "is_remote", "list_entries", "list_folder",
    "read_range", "read_text", "shard_cache",
]  # fmt: skip
