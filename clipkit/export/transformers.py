"""Export to transformers and sentence-transformers: ``config.json``, ``model.safetensors`` and others.

    transformers.CLIPModel.from_pretrained("OUT"), transformers.AutoProcessor.from_pretrained("OUT")
    sentence_transformers.SentenceTransformer("OUT")

Supports plain ViT CLIPs only. sentence-transformers reads the files of transformers and four small files of its
own.

Embeddings of identical pixels equal clipkit's. However, transformers' image processor resizes with another library:
for 60 generated images at 224 pixels, its values differed by 0.005 of 255 on average and by at most 20, and 12
images whose center lies between two pixels were cropped one pixel off. It converts palette and transparent images
to RGB before resizing instead of afterwards: for 20 generated images of other sizes, the median of the mean
difference was 0.003 of 255, for the same images with palettes 16, with an alpha channel and converted to RGB first
8, and with the alpha channel left to the processor 26.

Token ids equal clipkit's, with these differences. transformers pads with end of text (49407), clipkit with 0;
neither affects the features. transformers' tokenizer does not repair texts: apply ``ftfy.fix_text`` and
``html.unescape`` to texts with HTML entities, typographic quotes, ligatures, full-width letters or a wrong
encoding. The special tokens recognized inside a text are ``<|startoftext|>`` and ``<|endoftext|>`` in transformers,
``<start_of_text>`` and ``<end_of_text>`` in clipkit. A tokenizer other than CLIP's is exported with the model.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from clipkit.export.checks import Samples, max_difference
from clipkit.export.open_clip import store_tokenizer
from clipkit.formats.transformers import build_configs, to_transformers
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import (
    ANY_END,
    END_OF_TEXT,
    START_OF_TEXT,
    ClipTokenizer,
    TransformersTokenizer,
    find_text_end,
    list_tokens,
    read_merges,
)

WEIGHTS = "model.safetensors"
START, END = "<|startoftext|>", "<|endoftext|>"
# CLIP's splitting pattern with transformers' names of the special tokens
_WORD = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def find_obstacle(model: CLIP) -> str:
    """Return why transformers' ``CLIPModel`` cannot represent this model, or ""."""
    shape = model.architecture
    for tower in (shape.vision, shape.text):
        if not tower.is_clips:
            return f"transformers' CLIPModel has no tower like this one ({tower.description})"
    if shape.logit_bias:
        return "transformers' CLIPModel has no logit_bias"
    if model.preprocess.resize_mode == "longest":
        return "transformers' CLIPImageProcessor cannot resize the longer side and pad"
    if isinstance(model.tokenizer, TransformersTokenizer):
        return ""
    if not isinstance(model.tokenizer, ClipTokenizer) or shape.text.vocab_size <= END_OF_TEXT:
        return "transformers' CLIPTokenizer requires CLIP's vocabulary of 49,408 tokens"
    return ""


def write_model(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write a model with float32 weights on the CPU; return the names of the files."""
    configs = build_configs(model.architecture, model.preprocess)
    processor, preprocess = configs["preprocessor_config.json"], model.preprocess
    processor["processor_class"] = "CLIPProcessor"
    processor["resample"] = {"bilinear": 2, "bicubic": 3}[preprocess.interpolation]
    if preprocess.resize_mode == "squash":
        processor["size"] = {"height": preprocess.image_size, "width": preprocess.image_size}
        processor["do_center_crop"] = False
    if isinstance(model.tokenizer, TransformersTokenizer):
        # text features are read at the end-of-text token, or at the largest token if there is none
        library = model.tokenizer.load_library()
        end = find_text_end(model.tokenizer)
        configs["config.json"]["text_config"].update(
            bos_token_id=library.bos_token_id,
            pad_token_id=library.pad_token_id,
            eos_token_id=ANY_END if end is None else end,
        )
    tokenizer = store_tokenizer(model, folder)
    if not tokenizer:
        special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
        configs["special_tokens_map.json"] = special
        configs["tokenizer_config.json"] = {
            "tokenizer_class": "CLIPTokenizer",
            "processor_class": "CLIPProcessor",
            "model_max_length": model.architecture.text.context_length,
            **special,
        }
        tokenizer = write_clip_tokenizer(folder)
    for name, content in configs.items():
        _write_json(folder / name, content)
    if not (folder / WEIGHTS).exists():  # written already if both targets are exported
        save_file(to_transformers(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    return [*configs, WEIGHTS, *tokenizer]


def write_clip_tokenizer(folder: Path) -> list[str]:
    """Write CLIP's tokenizer for ``Tokenizer.from_file`` and for older libraries; return the names of the files."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    merges = read_merges()
    vocabulary = {token: i for i, token in enumerate([*list_tokens(), START, END])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=END, end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        (END, END_OF_TEXT), (START, START_OF_TEXT), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (START, END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["tokenizer.json", "vocab.json", "merges.txt"]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def measure_difference(model: CLIP, folder: Path, samples: Samples) -> float:
    """Load the folder with transformers as a user would; return the largest difference of unit-norm embeddings."""
    from transformers import AutoProcessor, CLIPModel

    with _without_bars():
        theirs, problems = CLIPModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(problems.values()), problems  # transformers only warns about missing or unexpected names
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    inputs = processor(
        text=list(samples.texts),
        images=list(samples.images) if model.preprocess.channels == 3 else None,
        return_tensors="pt",
        padding=True,
        truncation=True,
    )
    inputs.setdefault("pixel_values", samples.pixels)  # the processor reads RGB images
    out = theirs.eval()(**inputs)
    images = max_difference(out.image_embeds, samples.image_embeddings)
    return max(images, max_difference(out.text_embeds, samples.text_embeddings))


@contextmanager
def _without_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def format_example(model: CLIP) -> str:
    """Return code that loads the export and compares an image with texts."""
    return """
import torch
from PIL import Image
from transformers import AutoProcessor, CLIPModel

model, processor = CLIPModel.from_pretrained("{folder}"), AutoProcessor.from_pretrained("{folder}")
texts = ["a photo of a cat", "a photo of a dog"]
image = Image.open("cat.jpg").convert("RGB")
inputs = processor(text=texts, images=image, return_tensors="pt", padding=True, truncation=True)
with torch.no_grad():
    print(model(**inputs).logits_per_image.softmax(dim=-1))
"""


def write_model_sentence(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write the files of transformers and sentence-transformers; return their names."""
    names = write_model(model, tensors, folder)
    package = "sentence_transformers.base.modules"
    modules = [("", "transformer.Transformer"), ("1_Normalize", "normalize.Normalize")]
    features = {"text": "get_text_features", "image": "get_image_features"}
    configs: dict[str, Any] = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {
                kind: {"method": method, "method_output_name": "pooler_output"}
                for kind, method in features.items()
            },
            "module_output_name": "sentence_embedding",
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "similarity_fn_name": "cosine",
        },
        "1_Normalize/config.json": {
            "module_input_name": "sentence_embedding",
            "module_output_name": "sentence_embedding",
        },
    }
    for name, content in configs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        _write_json(folder / name, content)
    return [*names, *configs]


def measure_difference_sentence(model: CLIP, folder: Path, samples: Samples) -> float:
    """Load the folder with sentence-transformers; return the largest difference of unit-norm embeddings."""
    from sentence_transformers import SentenceTransformer

    with _without_bars():
        theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    images = theirs.encode(list(samples.images), show_progress_bar=False)
    texts = theirs.encode(list(samples.texts), show_progress_bar=False)
    return max(
        max_difference(images, samples.image_embeddings), max_difference(texts, samples.text_embeddings)
    )


def format_example_sentence(model: CLIP) -> str:
    """Return code that loads the export and compares an image with texts."""
    return """
from PIL import Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
image = model.encode([Image.open("cat.jpg").convert("RGB")])
text = model.encode(["a photo of a cat", "a photo of a dog"])
print(model.similarity(image, text))  # cosines, not multiplied by exp(t)
"""
