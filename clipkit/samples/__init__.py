"""Samples: every source as one list of samples, and every image as one kind of pixels."""

from clipkit.samples.base import Samples, decode_text, find_image, is_json, parse_fields
from clipkit.samples.decode import (
    decode_image,
    decode_jpeg,
    decode_pixels,
    jpeg_orientation,
    jpeg_size,
    open_image,
    pillow_errors,
    plain_jpeg_size,
    read_values,
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
    is_deep,
    is_white_zero,
    parse_pixel_range,
    refuse_deep_alpha,
    suggest_pixel_range,
    to_16_bit,
    value_extrema,
)
from clipkit.samples.folders import (
    PARQUET_PART,
    SPLIT_NAMES,
    SPLIT_WORDS,
    files_below,
    images_below,
    is_hidden,
    read_file,
    select_split,
)
from clipkit.samples.image_folder import (
    CLASS_NAMES,
    FolderSamples,
    are_ids,
    caption_table_of,
    find_captions,
    open_caption_tables,
    read_class_names,
)
from clipkit.samples.image_types import (
    ARRAY_EXTENSIONS,
    IMAGE_EXTENSIONS,
    check_image,
    describe_unreadable,
    image_format,
)
from clipkit.samples.index import (
    INDEX_VERSION,
    ShardIndex,
    Strings,
    index_of_members,
    index_place,
    pack_arrays,
    read_arrays,
    stored_index,
    unpack_arrays,
    with_content,
    write_arrays,
)
from clipkit.samples.shards import OpenShards, Shard, ShardSamples
from clipkit.samples.sources import (
    CACHE_GB,
    FORMATS,
    MissingSplit,
    OpenOptions,
    Source,
    find_source,
    find_split,
    folder_of_split,
    has_captions,
    join_place,
    list_files,
    open_samples,
)
from clipkit.samples.table import (
    CAPTION_COLUMNS,
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
from clipkit.samples.table.captions import check_captions, usable_texts
from clipkit.samples.table.groups import MOST_ROWS, RowsByKey, digest_key, merge_rows
from clipkit.samples.table.parquet import ENCODED_COLUMNS, ParquetSamples
from clipkit.samples.table.values import json_value
from clipkit.samples.tables import TableSamples
from clipkit.samples.tar import Content, TruncatedError, tar_files, tar_files_of
from clipkit.samples.traits import (
    NO_TRAITS,
    ORIENTATION_TAG,
    PILLOW_ERRORS,
    Color,
    Decoding,
    TraitCounts,
    Traits,
    color_of,
    flattened,
    is_transparent,
    orientation_of,
    upright_array,
    upright_image,
)

__all__ = [
    "ARRAY_EXTENSIONS", "CACHE_GB", "CAPTION_COLUMNS", "CLASS_NAMES", "ENCODED_COLUMNS", "FORMATS",
    "IMAGE_COLUMNS", "IMAGE_EXTENSIONS", "INDEX_VERSION", "MOST_ROWS", "NAMED_SUFFIXES", "NO_TRAITS",
    "ORIENTATION_TAG", "PARQUET_PART", "PILLOW_ERRORS", "SPLIT_NAMES", "SPLIT_WORDS", "STRETCH", "SUFFIXES",
    "Bands", "Color", "Content", "Decoding", "FolderSamples", "MissingSplit", "OpenOptions", "OpenShards",
    "ParquetSamples", "PixelRange", "PixelRangeError", "Row", "RowsByKey", "Samples", "Shard", "ShardIndex",
    "ShardSamples", "Source", "Strings", "Table", "TableSamples", "TraitCounts", "Traits", "TruncatedError",
    "are_ids", "are_integers", "caption_table_of", "check_captions", "check_image", "color_of",
    "decode_image", "decode_jpeg", "decode_pixels", "decode_text", "describe_depth", "describe_unreadable",
    "digest_key", "files_below", "find_captions", "find_column", "find_image", "find_source", "find_split",
    "flattened", "folder_of_split", "format_pixel_range", "gray_values", "has_captions", "image_format",
    "images_below", "index_of_members", "index_place", "is_deep", "is_hidden", "is_json", "is_table",
    "is_transparent", "is_white_zero", "join_place", "jpeg_orientation", "jpeg_size", "json_value",
    "list_files", "listed_path", "merge_rows", "open_caption_tables", "open_image", "open_samples",
    "orientation_of", "pack_arrays", "parse_fields", "parse_pixel_range", "pillow_errors",
    "plain_jpeg_size", "plain_name", "read_arrays", "read_class_names", "read_file", "read_split", "read_values",
    "readable_formats", "refuse_deep_alpha", "safe_cell", "select_split", "stored_index", "suggest_pixel_range",
    "tar_files", "tar_files_of", "to_16_bit", "unpack_arrays", "upright_array", "upright_image", "usable_texts",
    "value_extrema", "with_content", "write_arrays",
]  # fmt: skip
