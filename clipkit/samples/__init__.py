"""Samples: every source as one list of samples, and every image as one kind of pixels."""

from clipkit.samples.base import Samples, decode_text, find_image, is_json, parse_fields, value_at
from clipkit.samples.decode import (
    decode_image,
    decode_jpeg,
    decode_pixels,
    jpeg_orientation,
    jpeg_size,
    open_image,
    pillow_errors,
    plain_jpeg_size,
    read_beyond_pillow,
    readable_formats,
)
from clipkit.samples.depth import (
    STRETCH,
    Bands,
    PixelRange,
    PixelRangeError,
    are_integers,
    describe_depth,
    format_pixel_range,
    gray_values,
    has_deep_colors,
    is_beyond_png,
    is_deep,
    parse_pixel_range,
    refuse_deep_alpha,
    suggest_pixel_range,
    to_16_bit,
    value_extrema,
)
from clipkit.samples.folders import (
    SPLIT_NAMES,
    SPLIT_WORDS,
    files_below,
    images_below,
    is_hidden,
    read_file,
)
from clipkit.samples.formats import (
    IMAGE_EXTENSIONS,
    IMAGE_MEMBERS,
    describe_unreadable,
    image_format,
)
from clipkit.samples.image_folder import (
    CLASS_NAMES,
    FolderSamples,
    are_ids,
    find_caption_table,
    read_class_names,
)
from clipkit.samples.index import (
    INDEX_VERSION,
    ShardIndex,
    Strings,
    add_content_digest,
    index_members,
    index_path,
    is_indexable,
    is_indexed,
    pack_arrays,
    read_arrays,
    stored_index,
    unpack_arrays,
    write_arrays,
)
from clipkit.samples.shards import OpenShards, Shard, ShardSamples
from clipkit.samples.sources import (
    CACHE_GB,
    MissingSplit,
    OpenOptions,
    find_source,
    find_split,
    find_split_folder,
    find_splits,
    has_captions,
    join_place,
    list_files,
    open_samples,
    refuse_remote_table,
)
from clipkit.samples.table import (
    CAPTION_COLUMNS,
    HDF5_SUFFIXES,
    IMAGE_COLUMNS,
    NAMED_SUFFIXES,
    SUFFIXES,
    Row,
    Table,
    find_column,
    is_table,
    listed_path,
    plain_name,
    read_split,
    safe_cell,
)
from clipkit.samples.table.base import check_captions, json_value, parse_captions, usable_texts
from clipkit.samples.table.parquet import ParquetSamples
from clipkit.samples.tables import MOST_ROWS, RowsByKey, TableSamples, digest_key, merge_rows
from clipkit.samples.tar import TruncatedError, list_tar_content, list_tar_files
from clipkit.samples.traits import (
    NO_TRAITS,
    ORIENTATION_TAG,
    PILLOW_ERRORS,
    Color,
    Decoding,
    TraitCounts,
    Traits,
    blend_onto,
    color_of,
    is_transparent,
    read_orientation,
    upright_array,
    upright_image,
)

__all__ = [
    "CACHE_GB", "CAPTION_COLUMNS", "CLASS_NAMES", "HDF5_SUFFIXES", "IMAGE_COLUMNS", "IMAGE_EXTENSIONS",
    "IMAGE_MEMBERS", "INDEX_VERSION", "MOST_ROWS", "NAMED_SUFFIXES", "NO_TRAITS", "ORIENTATION_TAG",
    "PILLOW_ERRORS", "SPLIT_NAMES", "SPLIT_WORDS", "STRETCH", "SUFFIXES", "Bands", "Color", "Decoding",
    "FolderSamples", "MissingSplit", "OpenOptions", "OpenShards", "ParquetSamples",
    "PixelRange", "PixelRangeError", "Row", "RowsByKey", "Samples", "Shard", "ShardIndex", "ShardSamples",
    "Strings", "Table", "TableSamples", "TraitCounts", "Traits", "TruncatedError", "add_content_digest",
    "are_ids", "are_integers", "blend_onto", "check_captions", "color_of", "decode_image", "decode_jpeg",
    "decode_pixels", "decode_text", "describe_depth", "describe_unreadable", "digest_key", "files_below",
    "find_caption_table", "find_column", "find_image", "find_source", "find_split", "find_split_folder",
    "find_splits", "format_pixel_range", "gray_values", "has_captions", "has_deep_colors", "image_format",
    "images_below", "index_members", "index_path", "is_beyond_png", "is_deep", "is_hidden", "is_indexable",
    "is_indexed", "is_json", "is_table", "is_transparent", "join_place", "jpeg_orientation", "jpeg_size",
    "json_value", "list_files", "list_tar_content", "list_tar_files", "listed_path", "merge_rows",
    "open_image", "open_samples", "pack_arrays", "parse_captions", "parse_fields", "parse_pixel_range",
    "pillow_errors", "plain_jpeg_size", "plain_name", "read_arrays", "read_beyond_pillow", "read_class_names",
    "read_file", "read_orientation", "read_split", "readable_formats", "refuse_deep_alpha",
    "refuse_remote_table", "safe_cell", "stored_index", "suggest_pixel_range", "to_16_bit", "unpack_arrays",
    "upright_array", "upright_image", "usable_texts", "value_at", "value_extrema", "write_arrays",
]  # fmt: skip
