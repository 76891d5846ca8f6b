"""The measures: from features to ranks and predictions, from these to metrics, each with a 95% interval.

A metric is defined once, by what its dataset's authors or the CLIP paper mean by it; where CLIP_benchmark, WILDS,
DataComp or scikit-learn mean something else by the same name, the docstring says what and why. Throughout, a
similarity that is not a number never helps a model, and ties between a right and a wrong answer do not either
(but for classes, where the lower index comes first as in ``argmax``).

ranks.py           ranks, scores and top classes from similarities, which are taken in float32 blocks
accuracy.py        top-k, mean of top-1 and top-5, mean per class, per class, macro F1
ranking.py         average precision (11-point and plain), ROC AUC
groups.py          by group and in the worst one
confusion.py       what is taken for what, by class and superclass
calibration.py     expected calibration error and its bins
retrieval.py       R@k, mean and median rank
compositional.py   Winoground, SugarCrepe and ARO, WinoGAViL
compare.py         two models on the same items: McNemar, paired bootstrap
intervals.py       Wilson's interval and the one seeded bootstrap
"""

from eval.metrics.classes import (
    CalibrationBins,
    Confusion,
    GroupAccuracy,
    PerClass,
    calibration_bins,
    confusion,
    expected_calibration_error,
    f1_macro,
    f1_macro_statistic,
    group_accuracy,
    mean_of_top1_and_top5,
    mean_per_class_interval,
    mean_per_class_recall,
    mean_per_class_statistic,
    per_class_accuracy,
    superclass_confusion,
    top_k_accuracy,
    worst_group_accuracy,
)
from eval.metrics.intervals import (
    Comparison,
    Estimate,
    Statistic,
    compare_correct,
    compare_means,
    compare_statistics,
    mcnemar,
    mean_estimate,
    proportion,
    wilson_interval,
)
from eval.metrics.pairs import (
    Winoground,
    chance_of_recall,
    jaccard_index,
    mean_jaccard,
    mean_rank,
    median_rank,
    pairwise_accuracy,
    pairwise_correct,
    recall_at_k,
    winoground,
)
from eval.metrics.ranking import (
    average_precisions,
    map_11_point,
    mean_average_precision,
    mean_average_precision_statistic,
    roc_auc,
    roc_auc_statistic,
)
from eval.metrics.ranks import TopClasses, class_ranks, class_scores, match_ranks, top_classes

__all__ = [
    "CalibrationBins",
    "Comparison",
    "Confusion",
    "Estimate",
    "GroupAccuracy",
    "PerClass",
    "Statistic",
    "TopClasses",
    "Winoground",
    "average_precisions",
    "calibration_bins",
    "chance_of_recall",
    "class_ranks",
    "class_scores",
    "compare_correct",
    "compare_means",
    "compare_statistics",
    "confusion",
    "expected_calibration_error",
    "f1_macro",
    "f1_macro_statistic",
    "group_accuracy",
    "jaccard_index",
    "map_11_point",
    "match_ranks",
    "mcnemar",
    "mean_average_precision",
    "mean_average_precision_statistic",
    "mean_estimate",
    "mean_jaccard",
    "mean_of_top1_and_top5",
    "mean_per_class_interval",
    "mean_per_class_recall",
    "mean_per_class_statistic",
    "mean_rank",
    "median_rank",
    "pairwise_accuracy",
    "pairwise_correct",
    "per_class_accuracy",
    "proportion",
    "recall_at_k",
    "roc_auc",
    "roc_auc_statistic",
    "superclass_confusion",
    "top_classes",
    "top_k_accuracy",
    "wilson_interval",
    "winoground",
    "worst_group_accuracy",
]
