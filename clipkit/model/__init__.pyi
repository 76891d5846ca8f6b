from .architectures import (
    ARCHITECTURES as ARCHITECTURES,
    QUICKGELU as QUICKGELU,
    Architecture as Architecture,
    BagOfWords as BagOfWords,
    ClassTable as ClassTable,
    ImageArchitecture as ImageArchitecture,
    PixelTower as PixelTower,
    TextArchitecture as TextArchitecture,
    TextTower as TextTower,
    VisionTower as VisionTower,
)
from .attention import (
    attention_blocks as attention_blocks,
    attention_maps as attention_maps,
    encode_all_tokens as encode_all_tokens,
    patch_grid as patch_grid,
    reads_class_token as reads_class_token,
    text_heatmaps as text_heatmaps,
)
from .clip import (
    CLIP as CLIP,
)
from .cpu import (
    in_parallel as in_parallel,
    keep_memory as keep_memory,
    one_core_each as one_core_each,
)
from .generate import (
    caption_likelihoods as caption_likelihoods,
    check_generation as check_generation,
    generate_captions as generate_captions,
)
from .library_towers import (
    OpenClipText as OpenClipText,
    OpenClipVision as OpenClipVision,
    TimmVision as TimmVision,
    TransformersText as TransformersText,
)
from .measure import (
    architecture_gflops as architecture_gflops,
    image_gflops as image_gflops,
)
from .names import (
    IMAGE_TOWERS as IMAGE_TOWERS,
    TEXT_TOWERS as TEXT_TOWERS,
    architecture as architecture,
)
from .preprocess import (
    Preprocess as Preprocess,
    eval_pixels as eval_pixels,
    pixels_and_traits as pixels_and_traits,
)
from .probes import (
    image_representations as image_representations,
    layer_count as layer_count,
)
from .tokenizer import (
    CONTEXT_LENGTH as CONTEXT_LENGTH,
    END_OF_TEXT as END_OF_TEXT,
    MAX_CHARACTERS as MAX_CHARACTERS,
    ClassTokenizer as ClassTokenizer,
    ClipTokenizer as ClipTokenizer,
    create_tokenizer as create_tokenizer,
    tokenize as tokenize,
)
from .zero_shot import (
    encode_prompts as encode_prompts,
    evaluating as evaluating,
    fill_template as fill_template,
    indistinguishable_classes as indistinguishable_classes,
    token_numbers as token_numbers,
    with_class_head as with_class_head,
)
