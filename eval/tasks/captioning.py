"""Tasks of models with a decoder: ``captioning``, and ``likelihood``, zero-shot without a text tower.

``captioning`` describes each image and compares with its true captions by their tokens (``caption_tokens``). The
perplexity is that of the true captions, of which tokens beyond the decoder's length are left out. Prompts for
captions are not used.

Letters in shape comments: N images, B images of a batch, R captions, P prompts, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.model import caption_likelihoods, eval_pixels, evaluation_mode, generate_captions
from eval.datasets.dataset import require_captions
from eval.features.encoder import Ranks
from eval.metrics import METRICS, Descriptions, caption_tokens
from eval.results.details import captioning_details
from eval.tasks import Options
from eval.tasks.classify import prompt_outcome, report_classes
from eval.tasks.subject import Outcome, Subject, metric_scores

_ROWS = 128  # captions that the decoder computes at a time
_THREADS = 4  # that read images


def captioning(subject: Subject, options: Options) -> Outcome:
    """Run the task ``captioning``."""
    dataset = subject.dataset
    captions = require_captions(dataset)
    generated, likelihoods = _describe(subject, captions, options.beams)
    descriptions = Descriptions(
        generated=[caption_tokens(text) for text in generated],
        captions=[list(map(caption_tokens, image_captions)) for image_captions in captions],
        nll=likelihoods[:, 0].numpy(),
        predicted=likelihoods[:, 1].numpy(),
    )
    setting = f"{options.beams} beams" if options.beams > 1 else ""
    names = [name for name, metric in METRICS.items() if metric.kind == "captioning"]
    scores = metric_scores(dataset, names, descriptions, task="captioning", setting=setting)
    if not options.details:
        return Outcome(scores=scores)
    details = captioning_details(dataset, generated, descriptions, setting=setting, seed=options.seed)
    return Outcome(scores=scores, details=[details])


def _describe(subject: Subject, captions: Sequence[Sequence[str]], beams: int) -> tuple[list[str], Tensor]:
    """Return the generated caption of each image, and (N, 2) float64: −log p of the true ones, their tokens.

    The ranks share the images.
    """
    dataset = subject.dataset
    model = subject.encoder.model
    ranks = subject.encoder.ranks
    texts: dict[int, str] = {}
    likelihoods = torch.zeros(len(dataset), 2, dtype=torch.float64)

    def describe_batch(indices: Sequence[int], pixels: Tensor) -> None:
        generated = generate_captions(model, pixels, beams=beams, rows=indices)
        texts.update(zip(indices, generated, strict=True))
        likelihoods[list(indices)] = _sum_likelihoods(model, pixels, [captions[i] for i in indices])

    _compute_batches(subject, describe_batch, batch=_ROWS // beams)
    likelihoods = ranks.gather(likelihoods)
    if not bool(likelihoods.isfinite().all()):
        raise DataError(f"the model's likelihoods of the captions of dataset {dataset.name} are not finite")
    return _gather_texts(ranks, texts, len(dataset)), likelihoods


def likelihood(subject: Subject, options: Options) -> Outcome:
    """Run the task ``likelihood``: the class whose prompts, as captions, have the highest mean of log p.

    It needs no text tower, only the decoder (Tschannen et al. 2023, https://arxiv.org/abs/2306.07915).
    """
    report_classes(subject)
    dataset = subject.dataset
    if dataset.negative_templates:
        raise DataError(f"dataset {dataset.name}: negative_templates are for zero-shot, not for likelihood")
    model = subject.encoder.model
    prompts = dataset.prompts()
    tokens = model.tokenizer(list(chain.from_iterable(prompts)))  # (P, L)
    classes = _repeat_indices(prompts)  # (P,)
    order = torch.tensor(sorted(range(len(tokens)), key=tokens.tolist().__getitem__))  # by prefix
    scores = torch.zeros(len(dataset), len(prompts))  # (N, C)

    def score_batch(indices: Sequence[int], pixels: Tensor) -> None:
        _, image_tokens = model.image_tokens(pixels)
        sums = torch.zeros(len(indices), len(prompts))
        for rows in order.split(_ROWS):
            blocks = image_tokens.split(max(1, _ROWS // len(rows)))
            parts = [caption_likelihoods(model, images, tokens[rows]).float().cpu() for images in blocks]
            sums.index_add_(1, classes[rows], torch.cat(parts))
        scores[list(indices)] = sums / classes.bincount(minlength=len(prompts))

    _compute_batches(subject, score_batch, batch=_ROWS)
    scores = subject.encoder.ranks.gather(scores)
    if not bool(scores.isfinite().all()):
        raise DataError(f"the model's likelihoods of the prompts of dataset {dataset.name} are not finite")
    return prompt_outcome(subject, options, scores, torch.eye(len(prompts)), 1.0, task="likelihood")


def _compute_batches(
    subject: Subject, compute: Callable[[Sequence[int], Tensor], None], *, batch: int
) -> None:
    """Call ``compute`` with the indices and pixels (B, 3, S, S) of batches of this rank's images."""
    encoder = subject.encoder
    dataset = subject.dataset
    model = encoder.model
    ranks = encoder.ranks
    rank_images = range(ranks.rank, len(dataset), ranks.world)
    batch = max(1, min(encoder.batch_size, batch))

    def read_pixels(i: int) -> Tensor:
        try:
            return eval_pixels(dataset.images.read(i), model.preprocess)
        except DataError as error:
            where = f"{dataset.describe_image(i)}: {error}"
            raise DataError(f"{where}; fix or remove it (images are never skipped)") from error

    failed: dict[int, str] = {}
    try:
        with evaluation_mode(model), torch.inference_mode(), ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(rank_images), batch):
                indices = rank_images[start : start + batch]
                compute(indices, torch.stack([*pool.map(read_pixels, indices)]).to(encoder.device))
                if encoder.progress is not None:
                    encoder.progress(len(indices))
    except DataError as error:
        failed[ranks.rank] = str(error)
    # ranks that succeeded must not wait for results that will never come
    messages = [*filter(None, _gather_texts(ranks, failed, ranks.world))]
    if messages:
        raise DataError(messages[0])


def _sum_likelihoods(model: CLIP, pixels: Tensor, captions: Sequence[Sequence[str]]) -> Tensor:
    """Compute −log p of the true captions of each image, and the number of their tokens: (B, 2) float64."""
    _, image_tokens = model.image_tokens(pixels)
    texts = list(chain.from_iterable(captions))
    images = _repeat_indices(captions)  # (R,)
    totals = torch.zeros(len(captions), 2, dtype=torch.float64)
    for start in range(0, len(texts), _ROWS):
        rows = images[start : start + _ROWS]
        tokens = model.tokenizer(texts[start : start + _ROWS])
        lengths = (tokens.argmax(dim=-1) + 1).tolist()
        sums, counts = model.caption_nll(
            image_tokens[rows.to(image_tokens.device)], tokens.to(image_tokens.device), lengths=lengths
        )
        totals.index_add_(0, rows, torch.stack([sums.double(), counts.double()], dim=1).cpu())
    return totals


def _repeat_indices(groups: Sequence[Sequence[str]]) -> Tensor:
    return torch.arange(len(groups)).repeat_interleave(torch.tensor(list(map(len, groups))))


def _gather_texts(ranks: Ranks, texts: Mapping[int, str], count: int) -> list[str]:
    """Collect numbered texts, each of one rank; "" for numbers that no rank has."""
    encoded = {i: text.encode("utf-8", "replace") for i, text in texts.items()}
    longest = torch.zeros(ranks.world, dtype=torch.int64)
    longest[ranks.rank] = max(map(len, encoded.values()), default=0)
    table = torch.zeros(count, int(ranks.gather(longest).max()), dtype=torch.uint8)
    for i, text in encoded.items():
        table[i, : len(text)] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in ranks.gather(table).numpy()]
