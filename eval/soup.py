"""Average the weights of those models that improve the score on a dataset: the greedy soup of Wortsman et al.

Models that were fine-tuned from the same weights are ordered by their score on held-out images. Beginning with the
best, each is added to the mean of the weights unless the score of the mean falls (2022,
https://arxiv.org/abs/2203.05482, recipe 1). At most two models are in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from clipkit import CLIP, distributed
from clipkit.errors import ConfigError, DataError
from clipkit.export import interpolate, load_alike
from clipkit.files import resolve_output
from clipkit.formats import check_free, save_model
from clipkit.samples import MissingSplit
from eval.datasets.targets import Target, find_targets
from eval.features.encoder import ONE_RANK, Encoder, Ranks
from eval.metrics import METRICS
from eval.options import SoupOptions
from eval.run import current_ranks, evaluate, find_model, join_ranks
from eval.tasks import TASKS
from eval.tasks.subject import Subject

_HELD_OUT = "val"


def run_soup(options: SoupOptions) -> int:
    """Write the greedy soup of models."""
    with join_ranks(options.device) as device:
        out = resolve_output(options.out)
        leads = distributed.rank() == 0
        if leads:
            check_free(out)
        targets = find_targets(options.data, root=options.data_root, prompts=options.prompts)
        targets = [select_held_out(target, options.split) for target in targets]
        sources = [find_model(source).source for source in options.model]
        soup = greedy_soup(
            sources,
            targets,
            name=options.name,
            device=device,
            ranks=current_ranks(),
            batch_size=options.batch_size,
            say=print if leads else lambda line: None,
        )
        if not leads:
            return 0
        data = [f"{target.dataset.name}, split {target.dataset.split}" for target in targets]
        facts = {"mean": soup.selected, "score": soup.score, "scores": soup.scores, "data": data}
        save_model(soup.model, out, made_from=facts)
        print(
            f"wrote {out}: the mean of {len(soup.selected)} of {len(sources)} models, {soup.score:.4f} on "
            f"{' and '.join(data)}; the best model alone {max(soup.scores.values()):.4f}"
        )
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Soup:
    """A greedy soup.

    Attributes:
        model: the mean of the selected models.
        scores: the score of each model alone.
        selected: those in the mean, in the order in which they were added.
        score: the score of the mean.
    """

    model: CLIP
    scores: dict[str, float]
    selected: tuple[str, ...]
    score: float


def select_held_out(target: Target, split: str = "") -> Target:
    """Return the images of a dataset that models are selected on.

    Args:
        target: the dataset.
        split: name of the split; "" for the validation split if there is one, else the test split.
    """
    if (split or _HELD_OUT) == target.dataset.split:
        return target
    try:
        return replace(target, dataset=target.open_split(split or _HELD_OUT))
    except MissingSplit:
        if split:
            raise
        return target


def greedy_soup(
    sources: Sequence[str],
    targets: Sequence[Target],
    *,
    name: str = "",
    device: str = "cpu",
    ranks: Ranks = ONE_RANK,
    batch_size: int = 256,
    say: Callable[[str], None] = lambda line: None,
) -> Soup:
    """Average models greedily; the score is the mean of each dataset's primary metric on its main task.

    Args:
        sources: two or more arguments of ``clipkit.load``.
        targets: one or more datasets.
        name: the architecture, for weights stored without one.
        device: where models are averaged and scored.
        ranks: the processes that share the scoring.
        batch_size: images encoded at a time.
        say: called with a line for each score.

    Raises:
        ConfigError: models cannot be averaged, or there is only one.
        CheckpointError: a model cannot be loaded.
        DataError: a dataset is damaged or lacks what its task needs.
    """
    if len(sources) < 2:
        raise ConfigError("a soup needs two or more models: repeat --model")

    def score(model: CLIP) -> float:
        return fmean(_score_primary(model, target, ranks, batch_size) for target in targets)

    scores: dict[str, float] = {}
    for source, model in zip(sources, load_alike(sources, name=name, device=device), strict=True):
        scores[source] = score(model)
        say(f"{scores[source]:.4f}  {source}")
    first, *others = sorted(sources, key=scores.__getitem__, reverse=True)
    del model
    (soup,) = load_alike([first], name=name, device=device)
    best = scores[first]
    selected = [first]
    for source in others:
        (model,) = load_alike([source], name=name, device=device)
        interpolate(soup, model, 1 / (len(selected) + 1), into=model)
        mean_score = score(model)
        is_better = mean_score >= best
        say(f"{mean_score:.4f}  with {source}: {'kept' if is_better else 'left out'}")
        if is_better:
            soup = model
            best = mean_score
            selected.append(source)
    return Soup(model=soup, scores=scores, selected=tuple(selected), score=best)


def _score_primary(model: CLIP, target: Target, ranks: Ranks, batch_size: int) -> float:
    """Score a model by a dataset's primary metric, negated if smaller values are better."""
    task = (target.dataset.tasks if target.card is None else target.card.tasks)[0]
    metric = (*target.metrics, TASKS[task].metric)[0]
    encoder = Encoder(model, ranks=ranks, batch_size=batch_size)
    subject = Subject(encoder, target.dataset, metrics=target.metrics, open_split=target.open_split)
    values = [score.value for score in evaluate(subject, tasks=[task]) if score.metric == metric]
    if not values:
        raise DataError(f"dataset {target.dataset.name}: {metric} is undefined for its images")
    value = values[-1]  # in several languages, the last is the mean
    return value if METRICS[metric].larger_is_better else -value
