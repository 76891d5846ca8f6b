"""One model and what it has encoded: every picture and text goes through its towers once, for all tasks.

picture_pass.py is the work on pictures, feature_store.py keeps what comes of it.

Letters in shape comments: N pictures or texts, D embedding dimension, W width before the projection.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit import CLIP
from clipkit.encode import model_hash
from clipkit.image_traits import TraitCounts
from clipkit.representations import image_representations, layer_count
from clipkit.zero_shot import encode_prompts, evaluating
from data.remote.node_lock import NodeLock
from eval.dataset import EvalDataset
from eval.feature_store import FeatureTable, digest_of
from eval.image_models import ImageModel, no_text_tower
from eval.picture_pass import PicturePass, check_finite
from eval.ranks import ONE_RANK, Ranks

__all__ = ["Encoder", "ImageFeatures", "dtype_name"]

_FORMAT = 3  # of what is kept; another number where the same model and picture give other features
_TEXT_PIECE = 8192
_WAIT = 0.5  # seconds between two looks at what another process does
_log = logging.getLogger("eval")


class ImageFeatures:
    """Features of all N images of a split, in the dataset's order; on the CPU, perhaps memory-mapped.

    Args:
        column: returns the tensor of a name below, when it is first asked for.
        digests: returns the digest of each image's bytes.
    """

    def __init__(self, column: Callable[[str], Tensor], digests: Callable[[], list[bytes]] = list) -> None:
        self._column, self.digests = column, digests

    @cached_property
    def projected(self) -> Tensor:
        """(N, D) float32, unit norm."""
        return self._column("projected")

    @cached_property
    def before_projection(self) -> Tensor:
        """(N, W) float32, what the image tower gives before its last linear map, not normalized."""
        return self._column("before_projection")


class Encoder:
    """One model, and what it has encoded so far.

    With several ranks, all of them make the same calls in the same order and all get the whole. The model is used
    in evaluation mode and given back in the mode it had; no random numbers are drawn.

    Args:
        model: as it is. Under autocast its towers run in that type; features are float32 in any case.
        store: the folder where features of all models are kept; None keeps them in memory, for as long as this
            object lives.
        ranks: who shares the work.
        batch_size: pictures that the model takes at a time.
        progress: called with the number of pictures after each batch, and of those that are found in the store.

    Attributes:
        encoded: how many pictures and texts this rank's model has been given, by "images" and "texts".
        counts: how many images are transparent or rotated by EXIF, by dataset and split, of all asked for so far.
    """

    def __init__(
        self,
        model: CLIP,
        *,
        store: Path | None = None,
        ranks: Ranks = ONE_RANK,
        batch_size: int = 256,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.store, self.ranks, self.batch_size = model, store, ranks, batch_size
        self.progress = progress
        self.encoded = {"images": 0, "texts": 0}
        self.counts: dict[tuple[str, str], TraitCounts] = {}
        self._tables: dict[str, FeatureTable] = {}
        self._classifiers: dict[bytes, Tensor] = {}
        self._said_not_kept = False

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.logit_scale.device

    def images(self, dataset: EvalDataset) -> ImageFeatures:
        """The features of every picture of a dataset.

        Raises:
            DataError: a picture cannot be read or decoded; it is named, on every rank. Or the features are not
                finite, or cannot be kept.
        """
        widths = {
            "projected": self.model.architecture.embed_dim,
            "before_projection": self._width,
            "traits": 2,
        }
        table = self._table("images", widths)
        rows = self._rows(dataset, table, layers=())
        transparent, rotated = table.column("traits", rows).sum(dim=0).int().tolist()
        self.counts[dataset.name, dataset.split] = TraitCounts(
            images=len(rows), transparent=transparent, rotated=rotated
        )
        return ImageFeatures(lambda name: table.column(name, rows), lambda: table.digests(rows))

    def layers(self, dataset: EvalDataset) -> Mapping[int, Tensor]:
        """By the number of each block of the image tower, from 1: (N, W) float32, the class token behind it.

        All of them are encoded in one pass. An image tower of another library has none.

        Raises:
            DataError: as for ``images``.
        """
        layers = range(1, layer_count(self.model) + 1)
        if not layers:
            return {}
        table = self._table("layers", {f"layer_{layer}": self._width for layer in layers})
        rows = self._rows(dataset, table, layers=layers)
        return {layer: table.column(f"layer_{layer}", rows) for layer in layers}

    def texts(self, texts: Sequence[str], *, whose: str = "the captions") -> Tensor:
        """(N, D) float32, unit norm, on the model's device; each distinct text is encoded once ever.

        Raises:
            DataError: the features are not finite, or cannot be kept.
            ConfigError: the model has no text tower.
        """
        if texts and isinstance(self.model, ImageModel):
            raise no_text_tower(self.model.name)
        table = self._table("texts", {"projected": self.model.architecture.embed_dim})
        digests = {text: digest_of(text.encode("utf-8", "surrogatepass")) for text in texts}
        # by length: a batch is computed to its longest
        missing = sorted(
            (one for one in digests if table.find(digests[one]) is None), key=lambda one: (len(one), one)
        )
        missing = self._wanted_by_all(missing, digests)
        for start in range(0, len(missing), _TEXT_PIECE):
            piece = missing[start : start + _TEXT_PIECE]
            features = torch.zeros(len(piece), self.model.architecture.embed_dim, device=self.device)
            own = slice(self.ranks.rank, len(piece), self.ranks.world)
            with torch.inference_mode():
                features[own] = encode_prompts(self.model, piece[own])
                features = self.ranks.gather(features)
            self.encoded["texts"] += len(piece[own])
            check_finite(features, whose)
            table.append([digests[one] for one in piece], {"projected": features})
        rows = [table.find(digests[text]) for text in texts]
        return table.column("projected", np.array(rows, dtype=np.int64)).to(self.device)

    def classifier(self, prompts: Sequence[Sequence[str]], *, whose: str) -> Tensor:
        """One weight vector a class: its prompts' unit embeddings are averaged, and the mean is made unit norm.

        Args:
            prompts: of C classes, each at least one.
            whose: they are, for a message.

        Returns:
            (D, C) float32, unit columns, on the model's device.

        Raises:
            DataError: the features are not finite, or cannot be kept.
        """
        key = digest_of(json.dumps(prompts).encode())
        if key not in self._classifiers:
            every = self.texts([prompt for own in prompts for prompt in own], whose=whose)
            ends = np.cumsum([len(own) for own in prompts]).tolist()
            means = [every[end - len(own) : end].mean(dim=0) for own, end in zip(prompts, ends, strict=True)]
            self._classifiers[key] = F.normalize(torch.stack(means), dim=-1).T.contiguous()
        return self._classifiers[key]

    def _wanted_by_all(self, missing: list[str], digests: Mapping[str, bytes]) -> list[str]:
        """The texts that any rank lacks; ranks on other hosts may have other stores."""
        if self.ranks.world == 1:
            return missing
        every = sorted(digests, key=lambda one: (len(one), one))
        lacking = set(missing)
        count = self.ranks.gather(torch.tensor([float(one in lacking) for one in every]))
        return [one for one, lacked in zip(every, count.tolist(), strict=True) if lacked]

    @cached_property
    def _width(self) -> int:
        """W, found by a picture of zeros."""
        size = self.model.preprocess.image_size
        with evaluating(self.model), torch.inference_mode():
            nothing = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=self.device)
            return image_representations(self.model, nothing).before_projection.shape[1]

    @cached_property
    def _folder(self) -> Path | None:
        if self.store is None:
            return None
        return self.store / f"{model_hash(self.model)}-{dtype_name(self.model)}-{_FORMAT}"

    def _table(self, name: str, widths: Mapping[str, int]) -> FeatureTable:
        if name not in self._tables:
            folder = self._folder and self._folder / name
            self._tables[name] = FeatureTable(folder, widths, not_kept=self._not_kept)
        return self._tables[name]

    def _not_kept(self, error: OSError) -> None:
        if self.ranks.rank == 0 and not self._said_not_kept:
            why = f"cannot write {self.store}: {error.strerror}"
            _log.warning("%s; evaluation continues without keeping features (see --features)", why)
        self._said_not_kept = True

    def _rows(
        self, dataset: EvalDataset, table: FeatureTable, *, layers: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """The rows of a dataset's images in a table, (N,); those that are missing are encoded first."""
        key = f"{dataset.stamp}-{len(dataset)}"
        rows = table.rows_of(key, len(dataset))
        everywhere = self.ranks.gather(torch.tensor(float(rows is not None)))
        if rows is None or int(everywhere) < self.ranks.world:
            with self._alone_with(dataset, table, key):
                rows = table.rows_of(key, len(dataset)) if self.ranks.world == 1 else None
                if rows is None:  # and no other process has encoded them meanwhile
                    work = PicturePass(
                        self.model,
                        dataset,
                        table,
                        layers=layers,
                        ranks=self.ranks,
                        batch_size=self.batch_size,
                        progress=self.progress,
                    )
                    rows = work.run()
                    self.encoded["images"] += work.encoded
                    table.keep_rows(key, rows)
                    return rows
        if self.progress is not None:
            self.progress(len(dataset))
        return rows

    @contextmanager
    def _alone_with(self, dataset: EvalDataset, table: FeatureTable, key: str) -> Iterator[None]:
        """Wait while another process encodes the same images with the same model, which is faster."""
        if table.folder is None or self.ranks.world > 1:  # ranks wait for each other already
            yield
            return
        lock = NodeLock(table.folder / "rows" / f"{key}.lock")
        waits = False
        try:
            while not lock.try_acquire():
                if not waits:
                    _log.warning("dataset %s: another process is encoding it, waiting for that", dataset.name)
                    waits = True
                time.sleep(_WAIT)
        except OSError:  # the folder cannot be written, which the table reports
            yield
            return
        try:
            table.refresh()
            yield
        finally:
            lock.release()


def dtype_name(model: CLIP) -> str:
    """The number format that the towers run in, such as "float32" or "bfloat16"."""
    parameter = next(model.parameters())
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")
