"""What a model is asked to do with a dataset."""

from eval.tasks.retrieval import captions_of, retrieval
from eval.tasks.zero_shot import labels_of, zero_shot

__all__ = ["captions_of", "labels_of", "retrieval", "zero_shot"]
