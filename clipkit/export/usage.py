"""The examples in a model card: how each library loads an export and compares a picture with texts."""

from collections.abc import Mapping
from typing import Any

from clipkit.export.samples import TEXTS
from clipkit.model import CLIP
from clipkit.text_input import ClassTokenizer, ClipTokenizer

__all__ = ["usage"]

_CLIPKIT = """
import clipkit

model = clipkit.load("{folder}")
print(clipkit.classify("cat.jpg", ["cat", "dog"], model))
"""
_OPEN_CLIP = """
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
_TRANSFORMERS = """
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
_SENTENCE_TRANSFORMERS = """
from PIL import Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
image = model.encode([Image.open("cat.jpg").convert("RGB")])
text = model.encode(["a photo of a cat", "a photo of a dog"])
print(model.similarity(image, text))  # cosines, not multiplied by exp(t)
"""
_TIMM = """
import timm, torch
from PIL import Image

model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**config, is_training=False)
with torch.no_grad():
    features = model(transform(Image.open("cat.jpg").convert("RGB")).unsqueeze(0))
print(torch.nn.functional.normalize(features, dim=-1))  # the picture's embedding
"""
_ONNX = """
import json
from pathlib import Path
import numpy as np
import onnxruntime
from PIL import Image
{import}
folder = Path("{folder}")
config = json.loads((folder / "onnx_config.json").read_text())
visual, textual = (
    onnxruntime.InferenceSession(folder / config[kind]["file"], providers=["CPUExecutionProvider"])
    for kind in ("image", "text")
)
{picture}
values = (np.asarray(picture.convert("RGB"), np.float32) / 255 - how["mean"]) / how["std"]
pixels = values.transpose(2, 0, 1)[None].astype(np.float32)
{tokens}
image = visual.run(None, {"pixel_values": pixels})[0]
text = textual.run(None, {"input_ids": ids})[0]
logits = config["logit_scale"] * image @ text.T
chances = np.exp(logits - logits.max())
print(chances / chances.sum())
"""
_PICTURE = """
picture, how = Image.open("cat.jpg"), config["preprocess"]
size, resample = how["image_size"], Image.Resampling[how["interpolation"].upper()]
"""
_PICTURES = {  # by resize mode
    "shortest": """
short, (width, height) = min(picture.size), picture.size
wide, high = size * width // short, size * height // short
left, top = round((wide - size) / 2), round((high - size) / 2)
picture = picture.resize((wide, high), resample).crop((left, top, left + size, top + size))
""",
    "squash": """
picture = picture.resize((size, size), resample)
""",
    "longest": """
long, (width, height) = max(picture.size), picture.size
wide, high = max(1, round(size * width / long)), max(1, round(size * height / long))
canvas = Image.new("RGB", (size, size), (how["fill_color"],) * 3)
canvas.paste(picture.resize((wide, high), resample), ((size - wide) // 2, (size - high) // 2))
picture = canvas
""",
}
_CLIP_TOKENS = """
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_truncation(config["context_length"])
tokenizer.enable_padding(pad_id=0, pad_token="!", length={length})
ids = np.array([one.ids for one in tokenizer.encode_batch(["a photo of a cat", "a photo of a dog"])])
"""
_LIBRARY_TOKENS = """
texts = ["a photo of a cat", "a photo of a dog"]
ids = AutoTokenizer.from_pretrained(folder)(
    texts, padding="max_length", truncation=True, max_length=config["context_length"], return_tensors="np"
)["input_ids"]
"""
_CLASSES = """
ids = np.arange(len(config["classes"]))[:, None]  # in the order of the names there
"""

# measured as the docstring of clipkit/export/transformers.py tells
_PICTURES_NOTE = (
    "The checks say that the model is the same, not that every picture reaches it as the same pixels. transformers "
    "and sentence-transformers resize by another library than clipkit and open_clip do, and may cut one pixel "
    "beside: of 20 drawn pictures half differed by less than 0.004 of 255 in the mean. Palette pictures and those "
    "with an alpha channel must be made RGB first, as above; clipkit and open_clip do that after resizing, and "
    "half of those pictures differed by more than 15 (palette) and 8 (alpha) of 255 in the mean."
)
_TEXTS_NOTE = (
    "Their tokenizer does not repair texts: with HTML entities, typographic quotes, ligatures, full-width letters "
    "or a wrong encoding, tokens are others than clipkit's unless the text goes through "
    "`html.unescape(ftfy.fix_text(text))` first. And `<|startoftext|>` or `<|endoftext|>` inside a text are "
    "special there and plain characters here; what stands behind the latter is not read."
)
_TITLES = {"timm": "timm (the image encoder)", "onnx": "onnxruntime"}


def usage(model: CLIP, targets: Mapping[str, Any], *, folder: str) -> str:
    """How to load an export, as Markdown: a heading and an example for each library.

    Args:
        model: what was exported.
        targets: for which libraries, with the record of each (see ``clipkit.export``).
        folder: its folder's name.
    """
    examples = {
        "open_clip": _OPEN_CLIP,
        "transformers": _TRANSFORMERS,
        "sentence-transformers": _SENTENCE_TRANSFORMERS,
        "timm": _TIMM,
        "onnx": _onnx(model),
        "clipkit": _CLIPKIT,
    }
    readable = {"open_clip", "transformers", "sentence-transformers"}  # by clipkit itself
    parts = []
    for target in [*targets, *(["clipkit"] if readable & set(targets) else [])]:
        code = examples[target].strip().replace("{folder}", folder)
        kinds = "pictures" if target == "timm" else "pictures and texts"
        example = f"### {_TITLES.get(target, target)}\n\n```python\n{code}\n```"
        parts.append(f"{example}{_checked(targets.get(target, {}), kinds)}")
    if {"transformers", "sentence-transformers"} & set(targets):
        parts.append(_PICTURES_NOTE)
        if isinstance(model.tokenizer, ClipTokenizer):
            parts.append(_TEXTS_NOTE)
    return "\n\n".join(parts)


def _checked(record: Mapping[str, Any], kinds: str) -> str:
    by, largest = record.get("checked_by"), record.get("difference")
    if not by or not isinstance(largest, float):
        return ""
    samples = f"{len(TEXTS)} drawn pictures of exactly the model's size"
    if "text" in kinds:
        samples += f" and {len(TEXTS)} plain texts"
    return (
        f"\n\nChecked on {samples}: with {by} embeddings differ from clipkit's by at most {largest:.1e}. "
        "Nothing was resized there."
    )


def _onnx(model: CLIP) -> str:
    tokens, needed = _LIBRARY_TOKENS, "from transformers import AutoTokenizer\n"
    if isinstance(model.tokenizer, ClassTokenizer):
        tokens, needed = _CLASSES, ""
    if isinstance(model.tokenizer, ClipTokenizer):
        length = "None" if model.tokenizer.trim else 'config["context_length"]'
        tokens, needed = _CLIP_TOKENS.replace("{length}", length), "from tokenizers import Tokenizer\n"
    picture = _PICTURE.strip() + "\n" + _PICTURES[model.preprocess.resize_mode].strip()
    code = _ONNX.replace("{import}", needed)
    return code.replace("{picture}", picture).replace("{tokens}", tokens.strip())
