"""The task ``captioning``: describe each image, and compare with its true captions.

Captions are compared by their tokens (``caption_tokens``). The perplexity is that of the true captions, of which
tokens beyond the decoder's length are left out. Prompts for captions are not used.

Letters in shape comments: N images, B images of a batch, R captions.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.model import eval_pixels, evaluating, generate_captions
from eval.datasets.dataset import captions_of
from eval.features.encoder import Ranks
from eval.metrics import METRICS, Descriptions, caption_tokens
from eval.results.details import captioning_details
from eval.tasks import Options
from eval.tasks.subject import Outcome, Subject, metric_scores

__all__ = ["captioning"]

_ROWS = 128  # captions that the decoder computes at a time
_THREADS = 4  # that read images


def captioning(subject: Subject, options: Options) -> Outcome:
    """Run the task ``captioning``.

    Raises:
        Lacks: the dataset has no captions.
        DataError: they are all the same, an image cannot be read, or the model's outputs are not finite.
    """
    dataset = subject.dataset
    captions = captions_of(dataset)
    generated, likelihoods = _describe(subject, captions, options.beams)
    found = Descriptions(
        generated=[caption_tokens(one) for one in generated],
        captions=[[caption_tokens(one) for one in own] for own in captions],
        nll=likelihoods[:, 0].numpy(),
        predicted=likelihoods[:, 1].numpy(),
    )
    setting = f"{options.beams} beams" if options.beams > 1 else ""
    names = [name for name, metric in METRICS.items() if metric.kind == "captioning"]
    scores = metric_scores(dataset, names, found, task="captioning", setting=setting)
    if not options.details:
        return Outcome(scores=scores)
    details = captioning_details(dataset, generated, found, setting=setting, seed=options.seed)
    return Outcome(scores=scores, details=[details])


def _describe(subject: Subject, captions: Sequence[Sequence[str]], beams: int) -> tuple[list[str], Tensor]:
    """Return the generated caption of each image, and (N, 2) float64: −log p of the true ones, their tokens.

    The ranks share the images.
    """
    encoder, dataset = subject.encoder, subject.dataset
    model, ranks = encoder.model, encoder.ranks
    own = range(ranks.rank, len(dataset), ranks.world)
    batch = max(1, min(encoder.batch_size, _ROWS // beams))

    def pixels_of(number: int) -> Tensor:
        try:
            return eval_pixels(dataset.images.read(number), model.preprocess)
        except DataError as error:
            where = f"{dataset.where(number)}: {error}"
            raise DataError(f"{where}; fix or remove it (images are never skipped)") from error

    texts: dict[int, str] = {}
    likelihoods = torch.zeros(len(dataset), 2, dtype=torch.float64)
    failed: dict[int, str] = {}
    try:
        with evaluating(model), torch.inference_mode(), ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(own), batch):
                numbers = own[start : start + batch]
                pixels = torch.stack([*pool.map(pixels_of, numbers)]).to(encoder.device)  # (B, 3, S, S)
                found = generate_captions(model, pixels, beams=beams, rows=numbers)
                texts |= zip(numbers, found, strict=True)
                likelihoods[list(numbers)] = _likelihoods(model, pixels, [captions[i] for i in numbers])
                if encoder.progress is not None:
                    encoder.progress(len(numbers))
    except DataError as error:
        failed[ranks.rank] = str(error)
    # ranks that succeeded must not wait for captions that will never come
    if messages := [*filter(None, _gathered(ranks, failed, ranks.world))]:
        raise DataError(messages[0])
    likelihoods = ranks.gather(likelihoods)
    if not bool(likelihoods.isfinite().all()):
        raise DataError(f"the model's likelihoods of the captions of dataset {dataset.name} are not finite")
    return _gathered(ranks, texts, len(dataset)), likelihoods


def _likelihoods(model: CLIP, pixels: Tensor, captions: Sequence[Sequence[str]]) -> Tensor:
    """Compute −log p of the true captions of each image, and the number of their tokens: (B, 2) float64."""
    _, seen = model.image_tokens(pixels)
    texts = [one for own in captions for one in own]
    images = torch.tensor([i for i, own in enumerate(captions) for _ in own])  # (R,)
    found = torch.zeros(len(captions), 2, dtype=torch.float64)
    for start in range(0, len(texts), _ROWS):
        rows = images[start : start + _ROWS]
        tokens = model.tokenizer(texts[start : start + _ROWS])
        lengths = (tokens.argmax(dim=-1) + 1).tolist()
        sums, counts = model.caption_nll(seen[rows.to(seen.device)], tokens.to(seen.device), lengths=lengths)
        found.index_add_(0, rows, torch.stack([sums.double(), counts.double()], dim=1).cpu())
    return found


def _gathered(ranks: Ranks, own: Mapping[int, str], count: int) -> list[str]:
    """Collect numbered texts, each of one rank; "" for numbers that no rank has."""
    encoded = {number: text.encode("utf-8", "replace") for number, text in own.items()}
    longest = torch.zeros(ranks.world, dtype=torch.int64)
    longest[ranks.rank] = max(map(len, encoded.values()), default=0)
    table = torch.zeros(count, int(ranks.gather(longest).max()), dtype=torch.uint8)
    for number, text in encoded.items():
        table[number, : len(text)] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in ranks.gather(table).numpy()]
