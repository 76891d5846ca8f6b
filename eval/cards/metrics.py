"""Which metrics fit which task, by the names that cards and results call them.

The tasks that classify (zero-shot, linear-probe, few-shot, knn, fine-tune) share theirs: some are for pictures with
one label, others for pictures with several. A metric by group is for a column of the dataset's metadata.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.cards.fields import Fields
from eval.dataset import TASKS

__all__ = ["CARD_METRICS", "MetricKind", "metric_and_further", "task_and_metric"]

_OF_ONE_LABEL = ("acc1", "acc5", "mean_per_class_recall", "mean_top1_top5", "f1_macro", "roc_auc")
_OF_SEVERAL_LABELS = (
    "map_11_point", "map_11_point_softmax", "mean_average_precision", "mean_average_precision_softmax",
)  # fmt: skip
_OF_PAIRS = {
    "retrieval": (
        "mean_R@1",  # of both directions, DataComp's score for retrieval
        "image_to_text_R@1", "image_to_text_R@5", "image_to_text_R@10",
        "text_to_image_R@1", "text_to_image_R@5", "text_to_image_R@10",
    ),
    "compositional": (
        "accuracy", "macro_accuracy", "mean_per_group_accuracy",  # the right caption first: SugarCrepe, ARO
        "text", "image", "group",  # Winoground
        "jaccard", "jaccard_10", "jaccard_12", "jaccard_10-12",  # WinoGAViL, by how many candidates
    ),
}  # fmt: skip
CARD_METRICS = (*_OF_ONE_LABEL, *_OF_SEVERAL_LABELS, *_OF_PAIRS["retrieval"], *_OF_PAIRS["compositional"])
_PAIR = 2  # classes, for which an ROC curve is defined
_FIRST = 5  # of acc5
_OF_MORE = ("acc5", "mean_top1_top5")


@dataclass(frozen=True, kw_only=True)
class MetricKind:
    """What decides which metrics fit a dataset.

    Attributes:
        multilabel: whether a picture may have several labels.
        classes: how many there are; None where that is not known.
        columns: facts about each picture that metrics may group by, as ``worst_region_acc1`` does.
    """

    multilabel: bool = False
    classes: int | None = None
    columns: tuple[str, ...] = ()

    def fitting(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """Those that fit some of these tasks."""
        of_five = self.classes is None or self.classes > _FIRST  # the first five of five are always right
        one_label = [one for one in _OF_ONE_LABEL if one != "roc_auc" or self.classes in (None, _PAIR)]
        one_label = [one for one in one_label if of_five or one not in _OF_MORE]
        groups = [
            f"worst_{column}_acc{k}" for column in self.columns for k in ((1, _FIRST) if of_five else (1,))
        ]
        of_classes = _OF_SEVERAL_LABELS if self.multilabel else (*one_label, *groups)
        return tuple(dict.fromkeys(one for task in tasks for one in _OF_PAIRS.get(task, of_classes)))

    def fault(self, metrics: Sequence[str], tasks: Sequence[str]) -> str:
        """What must stand where metrics of these tasks stand, if one of these is none; else ""."""
        known = self.fitting(tasks)
        for metric in metrics:
            if metric not in known:
                other = _meant_for(metric)
                meant = f" ({metric} is for {other})" if other else ""
                return f"a metric of {' or '.join(tasks)}: {', '.join(known)}{meant}"
        return ""


def metric_and_further(fields: Fields, kind: MetricKind, tasks: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The primary metric, which fits the first task, and further ones, each of which fits some task.

    Raises:
        DataError: one does not.
    """
    metric = fields.raw("metric")
    further = () if fields.raw("further") == [] else fields.texts("further", ())
    if must := kind.fault([metric], tasks[:1]):
        raise fields.wrong("metric", must)
    if must := kind.fault(further, tasks):
        raise fields.wrong("further", f"a list of which each is {must}")
    if len({metric, *further}) <= len(further):
        raise fields.wrong("further", f"a list in which nothing stands twice, nor the metric {metric!r}")
    return metric, further


def task_and_metric(fields: Fields, kind: MetricKind) -> tuple[str, str]:
    """What the scores of a table are of.

    Raises:
        DataError: there is no such task, or the metric does not fit it.
    """
    task, metric = fields.one_of("task", TASKS), fields.raw("metric")
    if must := kind.fault([metric], [task]):
        raise fields.wrong("metric", must)
    return task, metric


def _meant_for(metric: str) -> str:
    """What a metric is for, where the reader may have meant that; "" where there is none of this name."""
    if metric in _OF_SEVERAL_LABELS:
        return "pictures with several labels, multilabel = true"
    if metric == "roc_auc":
        return "two classes"
    if metric in _OF_MORE:
        return "more than five classes, one label a picture"
    if metric in _OF_ONE_LABEL:
        return "classes, one label a picture"
    return next((task for task, metrics in _OF_PAIRS.items() if metric in metrics), "")
