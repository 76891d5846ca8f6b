"""Tars in the layouts of published datasets whose members have other names than jpg, txt and json."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from PIL import Image

BIOCLIP_TEXTS = (
    "com.txt", "common_name.txt", "sci.txt", "sci_com.txt", "scientific_name.txt", "taxon.txt", "taxonTag.txt",
    "taxonTag_com.txt", "taxon_com.txt", "taxonomic_name.txt",
)  # fmt: skip
SETTINGS = {
    "bioclip": ("", BIOCLIP_TEXTS),
    "rs5m": ("img_content", ("caption",)),
    "datacompdr": ("", ("txt", "syn.syn_text")),
}  # image and captions of each layout


def jpeg_of(number: int) -> bytes:
    """Return a small photograph-like JPEG."""
    spots = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(spots).resize((24, 20), Image.Resampling.BICUBIC).save(file, "jpeg")
    return file.getvalue()


def sample_of(layout: str, number: int) -> dict[str, Any]:
    """Return the members of a sample without its key."""
    if layout == "bioclip":
        return {"jpg": jpeg_of(number), **{name: f"{name} of {number}" for name in BIOCLIP_TEXTS}}
    if layout == "rs5m":
        name, caption = f"{number}.jpg", f"an aerial image of field {number}"
        return {"img_content": jpeg_of(number), "img_name": name, "caption": caption}
    assert layout == "datacompdr"
    np.savez(embeddings := io.BytesIO(), image_emb=np.zeros((2, 8), np.float16))
    return {
        "npz": embeddings.getvalue(),
        "paug.json": json.dumps({"param_aug": json.dumps([[0, 1]])}),
        "syn.json": json.dumps({"syn_text": [f"synthetic {i} of {number}" for i in range(5)]}),
        "jpg": jpeg_of(number),
        "txt": f"alt text of {number}",
    }


def write_published(layout: str, path: Path, samples: int = 24) -> Path:
    """Write a tar in a layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number in range(samples):
            members = sample_of(layout, number).items()
            encoded = {name: data.encode() if isinstance(data, str) else data for name, data in members}
            tar.write({"__key__": f"{number:06d}", **encoded})
    return path
