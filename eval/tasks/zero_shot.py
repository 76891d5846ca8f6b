"""Zero-shot classification: pictures against the class names' prompts (Radford et al. 2021, section 3.1)."""

from eval.results import Score
from eval.subject import Subject
from eval.tasks.classification import Answers, classification_scores, fitting_metrics

__all__ = ["zero_shot"]


def zero_shot(subject: Subject, *, calibration: bool = False) -> list[Score]:
    """The subject's metrics; where it names none, ``acc1``, ``acc5`` (of more than 5 classes), the mean per class.

    Args:
        subject: the model and the dataset.
        calibration: whether the expected calibration error is measured too, where a picture has one label.

    Raises:
        DataError: the dataset has no labels or no class names, or they are not what a metric needs.
    """
    answers = Answers(
        subject.dataset,
        subject.images().projected,
        subject.class_weights(),
        subject.logit_scale,
        subject.device,
    )
    metrics = fitting_metrics(subject.dataset, subject.metrics)
    if calibration and answers.labels.dim() == 1 and "ece" not in metrics:
        metrics = (*metrics, "ece")
    if calibration and subject.dataset.superclasses:
        metrics = (*metrics, "superclass_acc1")
    return classification_scores(answers, task="zero-shot", metrics=metrics)
