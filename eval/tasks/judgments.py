"""The task ``judgments``: the rank correlation of similarities with human judgments of images and captions.

The protocol is that of CLIPScore (Hessel et al. 2021, https://arxiv.org/abs/2104.08718): the similarity is the
cosine, or 0 if that is negative, with "A photo depicts" before each caption. CLIPScore is 2.5 times that, which
changes no rank. Each judgment counts by itself: three experts give a caption three ratings.

Dimensions: N images, K captions of an image, R judgments.
"""

import torch

from clipkit.errors import DataError
from eval.datasets.dataset import require_ratings
from eval.metrics import METRICS, Judgments
from eval.tasks import Options
from eval.tasks.compositional import compute_cosines
from eval.tasks.subject import Outcome, Subject, metric_scores


def judgments(subject: Subject, options: Options) -> Outcome:
    """Run the task ``judgments``."""
    dataset = subject.dataset
    rows = []
    for i, image_ratings in enumerate(require_ratings(dataset)):
        for k, ratings in enumerate(image_ratings):
            rows += [(i, k, rating) for rating in ratings]
    image, caption, rating = torch.tensor(rows, dtype=torch.float64).unbind(dim=1)  # (R,) each
    cosines = compute_cosines(subject, dataset.caption_prompts())  # (N, K)
    cosine = cosines[image.long(), caption.long()].double()  # (R,)
    similarity = cosine.clamp(min=0)
    for name, values in {"judgments": rating, "similarities": similarity}.items():
        if len(values.unique()) < 2:
            raise DataError(
                f"dataset {dataset.name}: all {name} are {float(values[0]):g}, so tau is undefined"
            )
    negative = int((cosine < 0).sum())
    if negative:
        subject.warn(f"{negative:,} of {len(cosine):,} cosines are negative and count as 0, as in CLIPScore")
    inputs = Judgments(similarity=similarity, rating=rating, image=image.long())
    names = [name for name, metric in METRICS.items() if metric.kind == "judgments"]
    prompt_set = dataset.caption_prompt_set
    return Outcome(scores=metric_scores(dataset, names, inputs, task="judgments", prompt_set=prompt_set))
