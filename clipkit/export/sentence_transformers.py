"""A model as sentence-transformers reads it: the files of transformers, and three small ones of its own.

sentence_transformers.SentenceTransformer("OUT")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clipkit.export import transformers
from clipkit.export.checks import Samples, difference
from clipkit.export.transformers import obstacle, without_bars, write_json
from clipkit.model.clip import CLIP

__all__ = ["check", "example", "obstacle", "write"]

_MODULES = "sentence_transformers.base.modules"


def write(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write the files of transformers and those that normalize its features; returns their names."""
    names = transformers.write(model, tensors, folder)
    modules = [("", "transformer.Transformer"), ("1_Normalize", "normalize.Normalize")]
    features = {"text": "get_text_features", "image": "get_image_features"}
    own: dict[str, Any] = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{kind}"}
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
    for name, content in own.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_json(folder / name, content)
    return [*names, *own]


def check(model: CLIP, folder: Path, samples: Samples) -> float:
    """Load the folder by sentence-transformers, as a user would; the largest difference of unit-norm embeddings."""
    from sentence_transformers import SentenceTransformer

    with without_bars():
        theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    images = theirs.encode(list(samples.images), show_progress_bar=False)
    texts = theirs.encode(list(samples.texts), show_progress_bar=False)
    return max(difference(images, samples.image_embeddings), difference(texts, samples.text_embeddings))


_EXAMPLE = """
from PIL import Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
image = model.encode([Image.open("cat.jpg").convert("RGB")])
text = model.encode(["a photo of a cat", "a photo of a dog"])
print(model.similarity(image, text))  # cosines, not multiplied by exp(t)
"""


def example(model: CLIP) -> str:
    """Code that loads the export and compares an image with texts."""
    return _EXAMPLE
