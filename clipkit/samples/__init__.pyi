from .base import (
    Samples as Samples,
    decode_text as decode_text,
    find_image as find_image,
    is_json as is_json,
    parse_fields as parse_fields,
    value_at as value_at,
)
from .decode import (
    decode_image as decode_image,
    decode_jpeg as decode_jpeg,
    decode_pixels as decode_pixels,
    jpeg_orientation as jpeg_orientation,
    jpeg_size as jpeg_size,
    open_image as open_image,
    pillow_errors as pillow_errors,
    plain_jpeg_size as plain_jpeg_size,
    read_values as read_values,
    readable_formats as readable_formats,
)
from .depth import (
    STRETCH as STRETCH,
    Bands as Bands,
    PixelRange as PixelRange,
    PixelRangeError as PixelRangeError,
    are_integers as are_integers,
    describe_depth as describe_depth,
    format_pixel_range as format_pixel_range,
    gray_values as gray_values,
    is_deep as is_deep,
    is_white_zero as is_white_zero,
    parse_pixel_range as parse_pixel_range,
    refuse_deep_alpha as refuse_deep_alpha,
    suggest_pixel_range as suggest_pixel_range,
    to_16_bit as to_16_bit,
    value_extrema as value_extrema,
)
from .folders import (
    PARQUET_PART as PARQUET_PART,
    SPLIT_NAMES as SPLIT_NAMES,
    SPLIT_WORDS as SPLIT_WORDS,
    files_below as files_below,
    images_below as images_below,
    is_hidden as is_hidden,
    read_file as read_file,
)
from .image_folder import (
    CLASS_NAMES as CLASS_NAMES,
    FolderSamples as FolderSamples,
    are_ids as are_ids,
    caption_table_of as caption_table_of,
    find_captions as find_captions,
    open_caption_tables as open_caption_tables,
    read_class_names as read_class_names,
)
from .image_types import (
    ARRAY_EXTENSIONS as ARRAY_EXTENSIONS,
    IMAGE_EXTENSIONS as IMAGE_EXTENSIONS,
    check_image as check_image,
    describe_unreadable as describe_unreadable,
    image_format as image_format,
)
from .index import (
    INDEX_VERSION as INDEX_VERSION,
    ShardIndex as ShardIndex,
    Strings as Strings,
    index_of_members as index_of_members,
    index_place as index_place,
    pack_arrays as pack_arrays,
    read_arrays as read_arrays,
    stored_index as stored_index,
    unpack_arrays as unpack_arrays,
    with_content as with_content,
    write_arrays as write_arrays,
)
from .shards import (
    OpenShards as OpenShards,
    Shard as Shard,
    ShardSamples as ShardSamples,
)
from .sources import (
    CACHE_GB as CACHE_GB,
    FORMATS as FORMATS,
    MissingSplit as MissingSplit,
    OpenOptions as OpenOptions,
    Source as Source,
    find_source as find_source,
    find_split as find_split,
    folder_of_split as folder_of_split,
    has_captions as has_captions,
    join_place as join_place,
    list_files as list_files,
    open_samples as open_samples,
)
from .table import (
    CAPTION_COLUMNS as CAPTION_COLUMNS,
    IMAGE_COLUMNS as IMAGE_COLUMNS,
    NAMED_SUFFIXES as NAMED_SUFFIXES,
    SUFFIXES as SUFFIXES,
    Row as Row,
    Table as Table,
    find_column as find_column,
    is_table as is_table,
    listed_path as listed_path,
    plain_name as plain_name,
    safe_cell as safe_cell,
)
from .table.captions import (
    check_captions as check_captions,
    parse_captions as parse_captions,
)
from .table.groups import (
    MOST_ROWS as MOST_ROWS,
    RowsByKey as RowsByKey,
    digest_key as digest_key,
    merge_rows as merge_rows,
)
from .table.parquet import (
    ParquetSamples as ParquetSamples,
)
from .table.values import (
    json_value as json_value,
)
from .tables import (
    TableSamples as TableSamples,
)
from .tar import (
    Content as Content,
    TruncatedError as TruncatedError,
    tar_files as tar_files,
    tar_files_of as tar_files_of,
)
from .traits import (
    NO_TRAITS as NO_TRAITS,
    ORIENTATION_TAG as ORIENTATION_TAG,
    PILLOW_ERRORS as PILLOW_ERRORS,
    Color as Color,
    Decoding as Decoding,
    TraitCounts as TraitCounts,
    Traits as Traits,
    color_of as color_of,
    flattened as flattened,
    is_transparent as is_transparent,
    orientation_of as orientation_of,
    upright_array as upright_array,
    upright_image as upright_image,
)
