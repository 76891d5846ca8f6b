"""Whose a score is: which lines of results are of the same weights, and what that model is called.

A model is what its weights are, however it was named when it was scored: by its run, a checkpoint of it, an export,
or another way to write the path. Lines of a training join those of ``python -m eval run`` on the same weights.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

__all__ = [
    "Named",
    "Origin",
    "is_of_checkpoint",
    "name_models",
    "named_checkpoint",
    "normal_name",
    "same_models",
]

_FILE_HASH = "sha256:"
_STEP = re.compile(r" at step \d+$")
_SCHEME = re.compile(r"^[a-z_]{2,20}:(?=.)")  # "open_clip:" before the name
_CHECKPOINT = re.compile(r"(?:(?P<run>.*)/)?checkpoints(?:/(?P<one>step_\d+|epoch_\w+\.pt))?")
_DIGITS = 12  # of a hash, in a label


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a line of results says of the model.

    Attributes:
        file: the results file.
        folder: that it lies in, from the root.
        typed: what the user called the model; "" where the line does not say it.
        weights: as in the scores.
        model_hash: as in the scores, or "".
        architecture: or "".
        step: of its training, or None.
    """

    file: str
    folder: str
    typed: str
    weights: str
    model_hash: str
    architecture: str
    step: int | None

    @cached_property
    def name(self) -> str:
        """The model without its checkpoint, its path in the shortest way to write it."""
        words = "" if self.is_of_file else _STEP.sub("", self.weights)
        name = _split(self.typed)[0] if self.typed else words
        return (PurePosixPath(self.folder).name if name in ("", ".") else name) or self.weights or "a model"

    @cached_property
    def run(self) -> str:
        """The same for all models of one run, and for names of one model: a run's own results know its folder."""
        return self.folder if self.short == PurePosixPath(self.folder).name else self.name

    @cached_property
    def checkpoint(self) -> str:
        """The checkpoint that the user named, if it was one of several."""
        return _split(self.typed)[1]

    @cached_property
    def short(self) -> str:
        """The last part of a path; else the name."""
        return self.name if _SCHEME.match(self.name) else PurePosixPath(self.name).name or self.name

    @property
    def is_of_file(self) -> bool:
        """Whether the weights are known by the hash of their file."""
        return self.weights.startswith(_FILE_HASH)

    @property
    def is_known(self) -> bool:
        """Whether there is any hash of the weights."""
        return bool(self.is_of_file or self.model_hash)


@dataclass(frozen=True, kw_only=True)
class Named:
    """A model's names.

    Attributes:
        label: what it is called on a page; no two are the same.
        name: the best that a user has given.
        names: all that it goes by.
        others: what else it was called, not counting other ways to write its path.
        run: the same for several models of one training.
        weights: the hash of their file where it is known.
        step: of its training, or None.
    """

    label: str
    name: str
    names: tuple[str, ...]
    others: tuple[str, ...]
    run: str
    weights: str
    step: int | None


def normal_name(typed: str) -> str:
    """A name without what does not matter in a path: ``./runs/a/`` is ``runs/a``, as are its checkpoints."""
    return _split(typed)[0]


def named_checkpoint(typed: str) -> str:
    """Which checkpoint of a run is named, such as ``step_00000600``; "" where the run itself is."""
    return _split(typed)[1]


def is_of_checkpoint(checkpoint: str, step: int | None, names: Iterable[str]) -> bool:
    """Whether weights of some step, or that go by some names, are those of a checkpoint of their run."""
    number = checkpoint.removeprefix("step_")
    if step is not None and number.isdecimal():
        return int(number) == step
    return checkpoint in map(named_checkpoint, names)


def _split(typed: str) -> tuple[str, str]:
    """The model, and which checkpoint of it."""
    if _SCHEME.match(typed):
        return typed, ""
    path = PurePosixPath(typed)
    text = str(path.parent if path.name == "model.safetensors" else path)
    found = _CHECKPOINT.fullmatch(text)
    return (found["run"] or ".", found["one"] or "") if found else (text, "")


def same_models(origins: Iterable[Origin]) -> dict[Origin, int]:
    """Number the models in the order in which they appear; what is of the same weights has the same number."""
    distinct = list(dict.fromkeys(origins))
    parents = list(range(len(distinct)))

    def root(i: int) -> int:
        while parents[i] != i:
            i = parents[i]
        return i

    def join(i: int, j: int) -> None:
        one, other = sorted((root(i), root(j)))
        parents[other] = one

    first: dict[Hashable, int] = {}
    for i, origin in enumerate(distinct):
        for key in _keys(origin):
            join(i, first.setdefault(key, i))
    _join_training(distinct, root, join)
    numbers: dict[int, int] = {}
    return {one: numbers.setdefault(root(i), len(numbers)) for i, one in enumerate(distinct)}


def _keys(origin: Origin) -> list[Hashable]:
    """Who shares one is the same model."""
    keys: list[Hashable] = []
    if origin.model_hash:
        keys.append(("model", origin.model_hash))
    if origin.is_of_file:  # which may be loaded as another architecture
        keys += [("file", origin.weights, origin.architecture), ("named", origin.run, origin.weights)]
    elif origin.weights or not origin.model_hash:
        keys.append(("named", origin.run, origin.checkpoint, origin.weights))
    return keys


def _join_training(
    origins: Sequence[Origin], root: Callable[[int], int], join: Callable[[int, int], None]
) -> None:
    """A training's own scores know the run and the step, not the weights: they are of the one model that does."""
    known: dict[Hashable, list[int]] = {}
    for i, one in enumerate(origins):
        if one.step is not None and one.is_known:
            known.setdefault((one.file, one.short, one.step, one.architecture), []).append(i)
    for i, one in enumerate(origins):
        if one.step is not None and not one.is_known:
            there = known.get((one.file, one.short, one.step, one.architecture), [])
            if len({root(j) for j in there}) == 1:
                join(i, there[0])


def name_models(models: Sequence[Sequence[Origin]]) -> list[Named]:
    """Name models that ``same_models`` has told apart, each by what the lines say of it."""
    heads = [_head(own) for own in models]
    of_run: dict[str, list[int]] = {}
    for i, head in enumerate(heads):
        of_run.setdefault(head.run, []).append(i)
    short = _short_names({run: heads[own[0]] for run, own in of_run.items()})
    steps = [next((one.step for one in reversed(own) if one.step is not None), None) for own in models]
    weights = [
        next((one.weights for one in reversed(own) if one.is_of_file), own[-1].weights) for own in models
    ]
    labels: dict[str, None] = {}
    named = []
    for i, (own, head) in enumerate(zip(models, heads, strict=True)):
        label, others = short[head.run], of_run[head.run]
        if len(others) > 1:
            if None not in (of := [steps[j] for j in others]) and len(set(of)) == len(of):
                label += f" at step {steps[i]}"
            elif all(cuts := [heads[j].checkpoint for j in others]) and len(set(cuts)) == len(cuts):
                label += f" {head.checkpoint}"
            else:
                told = weights[i].removeprefix(_FILE_HASH) or head.model_hash or "unnamed weights"
                label += f" ({told[:_DIGITS] if told != 'unnamed weights' else told})"
        while label in labels:
            label += "′"
        labels[label] = None
        names = dict.fromkeys(name for one in own for name in (one.name, one.typed) if name)
        named.append(
            Named(
                label=label,
                name=head.name,
                names=tuple(names),
                others=tuple(dict.fromkeys(one.name for one in own if one.typed and one.short != head.short)),
                run=head.run,
                weights=weights[i],
                step=steps[i],
            )
        )
    return named


def _head(origins: Sequence[Origin]) -> Origin:
    """Whose name a model bears: the first that a user has given, of a run rather than of its checkpoint."""
    first = min(origins, key=lambda one: not one.typed)
    of_name = [one for one in origins if one.short == first.short]
    return min(of_name, key=lambda one: (not one.typed, bool(one.checkpoint)))


def _short_names(heads: Mapping[str, Origin]) -> dict[str, str]:
    """As short as they can be while no two are the same.

    The folder that a run lies in says nothing, but the architecture before a tag does.
    """
    ways: dict[str, list[str]] = {}
    for run, head in heads.items():
        name, path = head.name, PurePosixPath(head.name)
        if _SCHEME.match(name):
            ways[run] = [_SCHEME.sub("", name), name]
        elif head.is_of_file or run == head.folder:
            # two folders may be of one name, each scored by that name from the folder above it
            parts = PurePosixPath(head.folder).parts if run == head.folder else path.parts
            ways[run] = [str(PurePosixPath(*parts[-k:])) for k in range(1, len(parts) + 1)] or [name]
        else:
            ways[run] = [name]
    longer = True
    while longer:
        longer = False
        shown = [own[0] for own in ways.values()]
        for own, now in zip(ways.values(), shown, strict=True):
            if len(own) > 1 and shown.count(now) > 1:
                own.pop(0)
                longer = True
    return {run: own[0] for run, own in ways.items()}
