"""Average the weights of those models that improve the score on a dataset: the greedy soup of Wortsman et al.

Models that were fine-tuned from the same weights are ordered by their score on held-out images. Beginning with the
best, each is added to the mean of the weights unless the score of the mean falls (2022,
https://arxiv.org/abs/2203.05482, recipe 1). At most two models are in memory.
"""

from dataclasses import replace
from statistics import fmean

from clipkit import CLIP, distributed
from clipkit.errors import ConfigError, DataError
from clipkit.export import interpolate, load_interpolatable
from clipkit.files import resolve_output
from clipkit.formats import check_free, save_model
from clipkit.samples import MissingSplit
from eval.datasets.targets import Target, find_targets
from eval.features.encoder import Encoder
from eval.metrics import lower_is_better
from eval.options import SoupOptions
from eval.run import current_ranks, evaluate, find_model, join_ranks
from eval.tasks import TASKS
from eval.tasks.subject import Subject

_HELD_OUT = "val"


def run_soup(options: SoupOptions) -> int:
    """Write the greedy soup of models; a model's score is the mean of each dataset's primary metric."""
    if len(options.model) < 2:
        raise ConfigError("a soup needs two or more models: repeat --model")
    with join_ranks(options.device) as device:
        out = resolve_output(options.out)
        leads = distributed.rank() == 0
        if leads:
            check_free(out)
        targets = find_targets(options.data, root=options.data_root, prompts=options.prompts)
        targets = [_select_held_out(target, options.split) for target in targets]
        sources = [find_model(source).source for source in options.model]

        def score(model: CLIP) -> float:
            return fmean(_score_primary(model, target, options.batch_size) for target in targets)

        def print_line(line: str) -> None:
            if leads:
                print(line)

        scores: dict[str, float] = {}
        models = load_interpolatable(sources, name=options.name, device=device)
        for source, model in zip(sources, models, strict=True):
            scores[source] = score(model)
            print_line(f"{scores[source]:.4f}  {source}")
        del model
        first, *others = sorted(sources, key=scores.__getitem__, reverse=True)
        (soup,) = load_interpolatable([first], name=options.name, device=device)
        selected = [first]
        best = scores[first]
        for source in others:
            (model,) = load_interpolatable([source], name=options.name, device=device)
            interpolate(soup, model, 1 / (len(selected) + 1), into=model)
            mean_score = score(model)
            is_better = mean_score >= best
            print_line(f"{mean_score:.4f}  with {source}: {'kept' if is_better else 'left out'}")
            if is_better:
                soup = model
                best = mean_score
                selected.append(source)
        if leads:
            data = [f"{target.dataset.name}, split {target.dataset.split}" for target in targets]
            facts = {"mean": tuple(selected), "score": best, "scores": scores, "data": data}
            save_model(soup, out, made_from=facts)
            print(
                f"wrote {out}: the mean of {len(selected)} of {len(sources)} models, {best:.4f} on "
                f"{' and '.join(data)}; the best model alone {max(scores.values()):.4f}"
            )
        return 0


def _select_held_out(target: Target, split: str) -> Target:
    """Return the split that models are selected on; "" for the validation split, else the test split."""
    if (split or _HELD_OUT) == target.dataset.split:
        return target
    try:
        return replace(target, dataset=target.open_split(split or _HELD_OUT))
    except MissingSplit:
        if split:
            raise
        return target


def _score_primary(model: CLIP, target: Target, batch_size: int) -> float:
    """Score a model by a dataset's primary metric, negated if smaller values are better."""
    task = (target.dataset.tasks if target.card is None else target.card.tasks)[0]
    metric = (*target.metrics, TASKS[task].metric)[0]
    encoder = Encoder(model, ranks=current_ranks(), batch_size=batch_size)
    subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
    values = [score.value for score in evaluate(subject, tasks=[task]) if score.metric == metric]
    if not values:
        raise DataError(f"dataset {target.dataset.name}: {metric} is undefined for its images")
    value = values[-1]  # in several languages, the last is the mean
    return -value if lower_is_better(metric) else value
