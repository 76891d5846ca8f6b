from .atomic import (
    FileLock as FileLock,
    lock_output as lock_output,
    replacing as replacing,
    sync as sync,
    write_atomic as write_atomic,
)
from .caption_files import (
    find_captions as find_captions,
    open_caption_tables as open_caption_tables,
    pair_captions as pair_captions,
    read_captions as read_captions,
)
from .class_names import (
    CLASS_NAMES as CLASS_NAMES,
    are_ids as are_ids,
    read_class_names as read_class_names,
)
from .cluster import (
    ray_cluster as ray_cluster,
)
from .decode import (
    decode_file as decode_file,
    decode_image as decode_image,
    decode_jpeg as decode_jpeg,
    jpeg_orientation as jpeg_orientation,
    jpeg_size as jpeg_size,
    open_image as open_image,
    pillow_errors as pillow_errors,
    plain_jpeg_size as plain_jpeg_size,
    readable_formats as readable_formats,
    upright_array as upright_array,
)
from .depth import (
    STRETCH as STRETCH,
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
    SPLIT_NAMES as SPLIT_NAMES,
    SPLIT_WORDS as SPLIT_WORDS,
    files_below as files_below,
    images_below as images_below,
    is_hidden as is_hidden,
)
from .hub import (
    from_hub as from_hub,
)
from .image_types import (
    check_image as check_image,
    describe_unreadable as describe_unreadable,
)
from .open_clip import (
    prompt_list as prompt_list,
)
from .pages import (
    check_page as check_page,
    templates as templates,
    write_page as write_page,
)
from .patterns import (
    IMAGE_EXTENSIONS as IMAGE_EXTENSIONS,
    IMAGE_SUFFIXES as IMAGE_SUFFIXES,
    PARQUET_PART as PARQUET_PART,
    check_parts as check_parts,
    expand_braces as expand_braces,
    match_wildcards as match_wildcards,
    name_order as name_order,
    output_folder as output_folder,
    path_order as path_order,
    user_path as user_path,
)
from .splitmix import (
    MASK as MASK,
    STEP as STEP,
    mix as mix,
    mix_array as mix_array,
)
from .table import (
    CAPTION_COLUMNS as CAPTION_COLUMNS,
    IMAGE_COLUMNS as IMAGE_COLUMNS,
    NAMED_SUFFIXES as NAMED_SUFFIXES,
    SUFFIXES as SUFFIXES,
    Row as Row,
    Table as Table,
    is_table as is_table,
    listed_path as listed_path,
    plain_name as plain_name,
    safe_cell as safe_cell,
)
from .tar import (
    Content as Content,
    FileContent as FileContent,
    TruncatedError as TruncatedError,
    sample_name as sample_name,
    tar_files as tar_files,
    tar_files_of as tar_files_of,
)
from .terminal import (
    CountProgress as CountProgress,
    counted as counted,
    printable as printable,
    shown as shown,
    size_of as size_of,
    without_secrets as without_secrets,
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
    hex_of as hex_of,
    is_transparent as is_transparent,
    orientation_of as orientation_of,
    upright_image as upright_image,
)
