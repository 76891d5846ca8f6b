"""Export to open_clip: ``open_clip_config.json`` and ``open_clip_model.safetensors``.

    open_clip.create_model_and_transforms("local-dir:OUT"), open_clip.get_tokenizer("local-dir:OUT")

Parameter names are open_clip's. Tokenizers of the transformers library are exported too, and the configuration of
an encoder in a local folder; CLIP's tokenizer is part of open_clip.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from clipkit.errors import ConfigError
from clipkit.export.checks import Samples, max_difference
from clipkit.files.open_clip import ENCODER, load_folder
from clipkit.model.clip import CLIP
from clipkit.model.names import to_open_clip
from clipkit.model.tokenizer import LibraryTokenizer, TransformersTokenizer

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def find_obstacle(model: CLIP) -> str:
    """Return why open_clip cannot represent this model, or ""."""
    try:
        config = to_open_clip(model.architecture)
    except ConfigError as error:
        return str(error)
    if isinstance(model.tokenizer, TransformersTokenizer) and "hf_tokenizer_name" not in config["text_cfg"]:
        return "open_clip uses CLIP's tokenizer for this kind of text tower, but this model has another one"
    return ""


def write_model(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write a model with float32 weights on the CPU; return the names of the files."""
    config = to_open_clip(model.architecture)
    names = store_tokenizer(model, folder)
    name = config["text_cfg"].get("hf_tokenizer_name")
    if names and name:
        # for a local folder, open_clip ignores this name and reads the tokenizer in the folder
        if Path(name).exists():
            name = folder.name
        config["text_cfg"] = {**config["text_cfg"], "hf_tokenizer_name": name}
    encoder = model.architecture.text.local_config
    if encoder is not None:
        (folder / ENCODER).mkdir()
        (folder / ENCODER / "config.json").write_text(json.dumps(encoder, indent=2) + "\n", encoding="utf-8")
        names = [*names, f"{ENCODER}/config.json"]
        # transformers, which open_clip calls, knows no path relative to the configuration
        config["text_cfg"] = {**config["text_cfg"], "hf_model_name": str((folder / ENCODER).absolute())}
    preprocess = model.preprocess.to_dict()
    preprocess["size"] = preprocess.pop("image_size")
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if "multimodal_cfg" in config and model.text_decoder is not None:
        decoder = model.text_decoder.state_dict(prefix="text_decoder.")
        tensors = {**tensors, **{name: value.contiguous() for name, value in decoder.items()}}
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    return [CONFIG, WEIGHTS, *names]


def store_tokenizer(model: CLIP, folder: Path) -> list[str]:
    """Write a tokenizer of the transformers library (nothing for CLIP's); return the names of the files."""
    if not isinstance(model.tokenizer, LibraryTokenizer | TransformersTokenizer):
        return []
    inner = folder / ".tokenizer"
    model.tokenizer.store(inner)
    files = sorted(path for path in inner.rglob("*") if path.is_file())
    for path in files:
        path.replace(folder / path.name)
    shutil.rmtree(inner)
    return [path.name for path in files]


@torch.no_grad()
def measure_difference(model: CLIP, folder: Path, samples: Samples) -> float:
    """Load the folder with open_clip as a user would; return the largest difference of unit-norm embeddings."""
    with torch.random.fork_rng(devices=[]):  # open_clip initializes weights before loading them
        theirs, transform, tokenize = load_folder(folder)
    theirs.eval()
    pixels = torch.stack([transform(image) for image in samples.images])
    tokens = tokenize(list(samples.texts))
    images = max_difference(theirs.encode_image(pixels, normalize=True), samples.image_embeddings)
    texts = max_difference(theirs.encode_text(tokens, normalize=True), samples.text_embeddings)
    return max(images, texts)


def format_example(model: CLIP) -> str:
    """Return code that loads the export and compares an image with texts."""
    return """
import open_clip, torch
from PIL import Image

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{folder}")
tokenizer = open_clip.get_tokenizer("local-dir:{folder}")
model.eval()
with torch.no_grad():
    image = model.encode_image(preprocess(Image.open("cat.jpg")).unsqueeze(0), normalize=True)
    text = model.encode_text(tokenizer(["a photo of a cat", "a photo of a dog"]), normalize=True)
print((model.logit_scale.exp() * image @ text.T).softmax(dim=-1))
"""
