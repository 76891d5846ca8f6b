"""The CLIP model: towers, architectures, tokenizer, preprocessing, and the zero-shot classifier."""

from clipkit.model.architectures import (
    ARCHITECTURES,
    QUICKGELU,
    Architecture,
    BagOfWords,
    ClassTable,
    ImageArchitecture,
    TextArchitecture,
    TextTower,
    VisionTower,
)
from clipkit.model.attention import (
    attention_blocks,
    encode_all_tokens,
    image_representations,
    layer_count,
    patch_grid,
    reads_class_token,
    text_heatmaps,
    watch_attention,
)
from clipkit.model.clip import CLIP
from clipkit.model.cpu import apply_cpu_settings, open_core_pool, run_parallel
from clipkit.model.generate import caption_likelihoods, generate_captions
from clipkit.model.library_towers import OpenClipText, OpenClipVision, TimmVision, TransformersText
from clipkit.model.measure import architecture_gflops, image_gflops
from clipkit.model.naflex import PatchBudget
from clipkit.model.names import IMAGE_TOWERS, TEXT_TOWERS, create_architecture
from clipkit.model.preprocess import Preprocess, eval_pixels, pixels_and_traits
from clipkit.model.tokenizer import (
    CONTEXT_LENGTH,
    END_OF_TEXT,
    MAX_CHARACTERS,
    ClassTokenizer,
    ClipTokenizer,
    create_tokenizer,
    tokenize,
)
from clipkit.model.towers import combine_features, select_distinct
from clipkit.model.zero_shot import (
    attach_class_head,
    encode_prompts,
    evaluation_mode,
    fill_template,
    find_indistinguishable_classes,
    number_texts,
)

__all__ = [
    "ARCHITECTURES", "CLIP", "CONTEXT_LENGTH", "END_OF_TEXT", "IMAGE_TOWERS", "MAX_CHARACTERS", "QUICKGELU",
    "TEXT_TOWERS", "Architecture", "BagOfWords", "ClassTable", "ClassTokenizer", "ClipTokenizer",
    "ImageArchitecture", "OpenClipText", "OpenClipVision", "PatchBudget", "Preprocess", "TextArchitecture",
    "TextTower", "TimmVision", "TransformersText", "VisionTower", "apply_cpu_settings", "architecture_gflops",
    "attach_class_head", "attention_blocks", "caption_likelihoods", "combine_features", "create_architecture",
    "create_tokenizer", "encode_all_tokens", "encode_prompts", "eval_pixels", "evaluation_mode", "fill_template",
    "find_indistinguishable_classes",
    "generate_captions", "image_gflops", "image_representations", "layer_count",
    "number_texts", "open_core_pool", "patch_grid", "pixels_and_traits", "reads_class_token", "run_parallel",
    "select_distinct", "text_heatmaps", "tokenize", "watch_attention",
]  # fmt: skip
