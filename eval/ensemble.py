"""Score the mean of several models' predictions, such as of CheXzero's ten best checkpoints (an ensemble).

Predictions are probabilities: of a softmax over the classes; or, if images have several labels, the sigmoid of the
similarity to each label. With a positive and a negative prompt the latter is a softmax over the two without the
model's scale (run_softmax_eval of Tiu et al. 2022, https://github.com/rajpurkarlab/CheXzero). An ensemble of equal
models has their scores. Two models are in memory at a time.

Dimensions: N images, C classes.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from clipkit import distributed
from clipkit.errors import ConfigError
from clipkit.files import counted
from clipkit.formats import model_hash
from clipkit.model import image_gflops
from eval.datasets.dataset import require_labels
from eval.datasets.targets import find_targets
from eval.features.encoder import Encoder
from eval.metrics import class_scores
from eval.options import ScoreOptions
from eval.readers.shards import Members
from eval.report.terminal import score_table
from eval.results.records import Score, append_results, provenance, time_now, weights_id, write_details
from eval.run import (
    check_towers,
    current_ranks,
    feature_folder,
    find_model,
    join_ranks,
    load_scored,
    print_traits,
    select_tasks,
    tower_autocast,
)
from eval.tasks.classify import prompt_outcome, report_classes
from eval.tasks.subject import Outcome, Subject

_TASK = "zero-shot"


@dataclass(kw_only=True)
class _Predictions:
    """The predictions of the models on a dataset.

    Attributes:
        subject: the last model's.
        total: (N, C) float64, the logarithm of the sum of the models' probabilities.
        scales: of the models.
        facts: of each model, the provenance of its predictions.
    """

    subject: Subject
    total: Tensor
    scales: list[float] = field(default_factory=list)
    facts: list[Mapping[str, Any]] = field(default_factory=list)

    def score(self, options: ScoreOptions) -> Outcome:
        """Score the mean as a model whose features are its predictions."""
        means = self.total - math.log(len(self.scales))
        scale = 1.0
        if require_labels(self.subject.dataset).dim() == 2:
            means -= torch.log1p(-means.exp())  # logits, which are the similarities if all models are equal
            scale = fmean(self.scales)
        return prompt_outcome(self.subject, options, means.float(), torch.eye(means.shape[1]), scale)


def run_ensemble(options: ScoreOptions) -> int:
    """Score the mean of the models' zero-shot predictions on each dataset, and print and append the scores."""
    if len(set(options.model)) < 2:
        raise ConfigError("an ensemble needs two or more models: repeat --model")
    if not options.data:
        raise ConfigError("no dataset given: use --data")
    check_towers(options.model, [_TASK])
    out = options.out or Path("results.jsonl")
    with join_ranks(options.device) as device:
        members = Members(image=options.image, captions=options.captions)
        targets = find_targets(options.data, root=options.data_root, prompts=options.prompts, members=members)
        for target in targets:
            select_tasks(target.dataset, [_TASK])
        predictions: dict[str, _Predictions] = {}
        for source in [find_model(name, out) for name in dict.fromkeys(options.model)]:
            model = load_scored(source, options, device)
            encoder = Encoder(
                model, store=feature_folder(options), ranks=current_ranks(), batch_size=options.batch_size
            )
            weights, _ = weights_id(source.source)
            for target in targets:
                subject = Subject(encoder, target.dataset, metrics=target.metrics)
                select_tasks(subject.dataset, [_TASK], classes=model.architecture.text.classes)
                with tower_autocast(options, device):
                    report_classes(subject)
                    log_probabilities = _predict(subject)
                    facts = provenance(model, subject.dataset, weights=weights)
                facts |= {
                    "model": source.name,
                    "model_hash": model_hash(model),
                    "gflops": image_gflops(model),
                }
                name = target.dataset.name
                log_zero = torch.full_like(log_probabilities, -torch.inf)
                sums = predictions.setdefault(name, _Predictions(subject=subject, total=log_zero))
                sums.subject = subject
                sums.total = torch.logaddexp(sums.total, log_probabilities)
                sums.scales.append(subject.logit_scale)
                sums.facts.append(facts)
            if distributed.rank() == 0:
                print_traits(encoder.counts, model, options)
        scores: list[Score] = []
        for sums in predictions.values():
            outcome = sums.score(options)
            scores += outcome.scores
            if distributed.rank() == 0:
                facts = _combine_facts(sums.facts)
                append_results(out, outcome.scores, step=None, provenance=facts)
                for details in outcome.details:
                    write_details(out, details, weights=facts["weights"])
        if distributed.rank() == 0:
            Console(highlight=False).print(score_table(scores))
            print(f"wrote {counted(len(scores), 'line')} to {out.absolute()}")
    return 0


def _predict(subject: Subject) -> Tensor:
    """Return the logarithms of a model's probabilities, (N, C) float64."""
    features = subject.images().projected
    scores = class_scores(features, subject.class_weights(), device=subject.device).double()
    if require_labels(subject.dataset).dim() == 2:
        return F.logsigmoid(scores)
    return torch.log_softmax(scores * subject.logit_scale, dim=1)


def _combine_facts(models: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the provenance of an ensemble: what all models have in common, and their names and weights."""
    first = models[0]
    facts = {name: first[name] for name in first if all(model[name] == first[name] for model in models)}
    for name in ("weights", "model_hash"):
        joined = " ".join(sorted(str(model[name]) for model in models))
        facts[name] = f"ensemble:{hashlib.sha256(joined.encode()).hexdigest()[:16]}"
    facts["model"] = f"ensemble of {len(models)} models"
    facts["ensemble"] = ", ".join(f"{model['model']} ({model['weights']})" for model in models)
    facts["architecture"] = ", ".join(dict.fromkeys(model["architecture"] for model in models))
    facts["gflops"] = sum(model["gflops"] for model in models)
    facts["time"] = time_now()
    return facts
