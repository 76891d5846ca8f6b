"""Tests of mteb's evaluation of a model on a small local task, against a direct computation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clipkit import CLIP
from clipkit.errors import ConfigError
from clipkit.model import encode_prompts, eval_pixels
from eval import mteb_model

mteb = pytest.importorskip("mteb")
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ["red", "green", "blue", "yellow"]


def images_and_labels() -> tuple[list[Image.Image], list[int]]:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)) for _ in range(30)]
    return images, [i % len(NAMES) for i in range(30)]


def task(tmp_path: Path) -> Any:
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.abstasks.zeroshot_classification import AbsTaskZeroShotClassification

    class Colours(AbsTaskZeroShotClassification):  # type: ignore[misc, unused-ignore]
        metadata = TaskMetadata(
            name="Colours",
            description="a test",
            reference=None,
            dataset={"path": "none", "revision": "none"},
            type="ZeroShotClassification",
            category="i2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="accuracy",
            modalities=["text", "image"],
        )

        def load_data(self, *_: Any, **__: Any) -> None:
            images, labels = images_and_labels()
            self.dataset = DatasetDict(test=Dataset.from_dict({"image": images, "label": labels}))
            self.data_loaded = True

        def get_candidate_labels(self) -> list[str]:
            return [f"a photo of a {name}." for name in NAMES]

    return Colours()


def test_mteb_accuracy_equals_direct_computation(
    model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    cache = mteb.ResultCache(cache_path=tmp_path)
    found = mteb.evaluate(
        mteb_model(model, "me/small"), task(tmp_path), cache=cache, encode_kwargs={"batch_size": 7}
    )
    (result,) = found.task_results
    images, labels = images_and_labels()
    with torch.inference_mode():
        cosines = (
            model.encode_image(torch.stack([eval_pixels(image, model.preprocess) for image in images]))
            @ encode_prompts(model, [f"a photo of a {name}." for name in NAMES]).T
        )
    accuracy = (cosines.argmax(dim=1) == torch.tensor(labels)).float().mean().item()
    assert result.get_score() == pytest.approx(accuracy)
    assert list(tmp_path.rglob("Colours.json"))


def test_feature_of_image_with_text_is_their_sum(model: CLIP) -> None:
    images, _ = images_and_labels()
    adapter = mteb_model(model)
    both = adapter.encode([{"image": images[:2], "text": NAMES[:2]}])
    apart = adapter.encode([{"image": images[:2]}]) + adapter.encode([{"text": NAMES[:2]}])
    torch.testing.assert_close(both, apart)
    with pytest.raises(ConfigError, match="expected OWNER/NAME"):
        mteb_model(model, "small")
