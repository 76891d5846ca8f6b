"""A model as transformers and sentence-transformers read it: ``config.json``, ``model.safetensors`` and their like.

    transformers.CLIPModel.from_pretrained("OUT"), transformers.AutoProcessor.from_pretrained("OUT")
    sentence_transformers.SentenceTransformer("OUT")

Plain ViT CLIPs only. The second library reads the files of the first and three small ones of its own.

Embeddings of the same pixels are clipkit's. Their image processor resizes by another library: on 60 drawn pictures
at 224 pixels its values were 0.005 of 255 off in the mean and 20 at most, and 12 of the pictures, with their middle
between two pixels, were cut one beside. It makes palette and transparent pictures RGB before resizing, not after:
20 drawn pictures of other sizes differed by 0.003 of 255 in the median of their means, as palettes by 16, with an
alpha channel and made RGB first by 8, and with the alpha channel left to the processor by 26.

Token ids are clipkit's, with these differences. Padding is end of text (49407) there and 0 here, and neither
reaches the features. Their tokenizer does not repair texts: one with HTML entities, typographic quotes,
ligatures, full-width letters or a wrong encoding should go through ``ftfy.fix_text`` and ``html.unescape`` first.
Inside a text ``<|startoftext|>`` and ``<|endoftext|>`` are special there, ``<start_of_text>`` and ``<end_of_text>``
here. A model that came with a tokenizer of its own takes that along.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from clipkit.export.checks import Samples, difference
from clipkit.export.open_clip import store_tokenizer
from clipkit.formats.transformers import to_transformers, transformers_configs
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import (
    ANY_END,
    END_OF_TEXT,
    START_OF_TEXT,
    ClipTokenizer,
    TransformersTokenizer,
    end_of_texts,
    pair_merges,
    tokens_in_order,
)

__all__ = ["check", "example", "obstacle", "without_bars", "write", "write_clip_tokenizer", "write_json"]

WEIGHTS = "model.safetensors"
START, END = "<|startoftext|>", "<|endoftext|>"
# CLIP's splitting rule with transformers' names of the special tokens
_WORD = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def obstacle(model: CLIP) -> str:
    """Why transformers' ``CLIPModel`` cannot hold this model, or ""."""
    shape = model.architecture
    for tower in (shape.vision, shape.text):
        if tower.plain is None:
            return f"transformers' CLIPModel has no tower like this one ({tower.description})"
    if shape.logit_bias:
        return "transformers' CLIPModel has no logit_bias"
    if model.preprocess.resize_mode == "longest":
        return "transformers' CLIPImageProcessor cannot resize the longer side and add a border"
    _, text = shape.own_towers()
    if isinstance(model.tokenizer, TransformersTokenizer):
        return ""
    if not isinstance(model.tokenizer, ClipTokenizer) or text.vocab_size <= END_OF_TEXT:
        return "transformers' CLIPTokenizer needs CLIP's 49,408 tokens"
    return ""


def write(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write the model's files; returns their names.

    Args:
        model: to export.
        tensors: its weights, float32 on the CPU.
        folder: to write to.
    """
    configs = transformers_configs(model.architecture, model.preprocess)
    _fit_processor(configs["preprocessor_config.json"], model)
    _fit_special_tokens(configs["config.json"]["text_config"], model)
    for name, content in configs.items():
        write_json(folder / name, content)
    if not (folder / WEIGHTS).exists():  # the other library's target may have written it
        save_file(to_transformers(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    tokenizer = store_tokenizer(model, folder) or _write_clips(model, folder)
    return [*configs, WEIGHTS, *tokenizer]


def _write_clips(model: CLIP, folder: Path) -> list[str]:
    """Write CLIP's tokenizer and its settings."""
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    write_json(folder / "special_tokens_map.json", special)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "CLIPTokenizer",
            "processor_class": "CLIPProcessor",
            "model_max_length": model.architecture.text.context_length,
            **special,
        },
    )
    return ["special_tokens_map.json", "tokenizer_config.json", *write_clip_tokenizer(folder)]


def _fit_special_tokens(config: dict[str, Any], model: CLIP) -> None:
    """Set the ids of special tokens for a tokenizer of the model's own; texts are read at their largest token."""
    if isinstance(own := model.tokenizer, TransformersTokenizer):
        library = own.library()
        numbers = {name: getattr(library, name) for name in ("bos_token_id", "pad_token_id")}
        end = end_of_texts(own)
        config.update({**numbers, "eos_token_id": ANY_END if end is None else end})


def _fit_processor(config: dict[str, Any], model: CLIP) -> None:
    """Set what differs from CLIP's preprocessing."""
    preprocess = model.preprocess
    config["processor_class"] = "CLIPProcessor"
    config["resample"] = {"bilinear": 2, "bicubic": 3}[preprocess.interpolation]
    if preprocess.resize_mode == "squash":
        config["size"] = {"height": preprocess.image_size, "width": preprocess.image_size}
        config["do_center_crop"] = False


def write_clip_tokenizer(folder: Path) -> list[str]:
    """CLIP's vocabulary, as ``Tokenizer.from_file`` and as older libraries read it; returns the files' names."""
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

    merges = pair_merges()
    vocabulary = {token: number for number, token in enumerate([*tokens_in_order(), START, END])}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token=END, end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.post_processor = processors.RobertaProcessing(
        (END, END_OF_TEXT), (START, START_OF_TEXT), trim_offsets=False, add_prefix_space=False
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (START, END)])
    made.save(str(folder / "tokenizer.json"))
    write_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["tokenizer.json", "vocab.json", "merges.txt"]


def write_json(path: Path, content: Any) -> None:
    """Write a configuration file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def check(model: CLIP, folder: Path, samples: Samples) -> float:
    """Load the folder by transformers, as a user would; the largest difference of unit-norm embeddings."""
    from transformers import AutoProcessor, CLIPModel

    with without_bars():
        theirs, found = CLIPModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(found.values()), found  # missing or unexpected names are only a warning there
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    inputs = processor(
        text=list(samples.texts),
        images=list(samples.images),
        return_tensors="pt",
        padding=True,
        truncation=True,
    )
    out = theirs.eval()(**inputs)
    images = difference(out.image_embeds, samples.image_embeddings)
    return max(images, difference(out.text_embeds, samples.text_embeddings))


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


_EXAMPLE = """
import torch
from PIL import Image
from transformers import AutoProcessor, CLIPModel

model, processor = CLIPModel.from_pretrained("{folder}"), AutoProcessor.from_pretrained("{folder}")
texts = ["a photo of a cat", "a photo of a dog"]
picture = Image.open("cat.jpg").convert("RGB")
inputs = processor(text=texts, images=picture, return_tensors="pt", padding=True, truncation=True)
with torch.no_grad():
    print(model(**inputs).logits_per_image.softmax(dim=-1))
"""


def example(model: CLIP) -> str:
    """Code that loads the export and compares an image with texts."""
    return _EXAMPLE
