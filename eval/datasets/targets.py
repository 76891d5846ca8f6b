"""What a user names, a dataset, a folder or a suite, as datasets to score on: opened, bound to cards, checked."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files.terminal import counted
from data.corpora.builtin import BUILTIN
from data.remote.store import Unreachable, is_remote, shown
from eval.datasets import Card, card_names, load_card, load_suite, read_card, suite_names
from eval.datasets.card import MetricKind
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, Lacks, some
from eval.readers import find_published, open_dataset, open_datasets
from eval.readers.parquet import open_hugging_face
from eval.readers.torchvision import NotFetched, open_torchvision

__all__ = [
    "OWN_CARD",
    "Missing",
    "Target",
    "Trouble",
    "find_named",
    "find_suites",
    "find_targets",
]

OWN_CARD = "card.toml"
_log = logging.getLogger("eval")


class Missing(DataError):
    """A dataset is not to be had here; says how to get it."""


Opener = Callable[[str], EvalDataset]  # of a split


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A dataset to score on, the split for it opened.

    Attributes:
        dataset: the split that is scored, with the prompts of its card.
        metrics: the primary metric first; none where there is no card.
        card: what is known of it, if anything is.
        keys: what the dataset itself calls its classes.
        opener: opens any of its splits as it lies there.
        own_card: whether the card lies beside the images, and so knows all their splits.
    """

    dataset: EvalDataset
    metrics: tuple[str, ...] = ()
    card: Card | None = None
    keys: tuple[str, ...]
    opener: Opener
    own_card: bool = False

    def open_split(self, split: str) -> EvalDataset:
        """Another split of the same dataset, its classes named as here.

        Raises:
            NoSplit: there is none.
            DataError: it is broken, or its classes are others.
        """
        found, bound = self.opener(split), self.dataset
        if self.own_card and self.card is not None:  # others may be of another edition's training images
            self.card.check_size(split, len(found))
        if found.class_names != self.keys:
            raise DataError(
                f"dataset {bound.name} has other classes in split {split!r} than in split {bound.split!r}, or in "
                "another order"
            )
        return replace(
            found, name=bound.name, class_names=bound.class_names, synonyms=bound.synonyms,
            prompt_set=bound.prompt_set, templates=bound.templates, superclasses=bound.superclasses,
        )  # fmt: skip


def find_targets(names: Sequence[str], *, root: Path | str | None = None, prompts: str = "") -> list[Target]:
    """Open the datasets that a user names one by one; raises the first of what ``find_named`` gives besides."""
    targets, trouble = find_named(names, root=root, prompts=prompts)
    if trouble:
        raise trouble[0]
    return targets


def find_named(
    names: Sequence[str], *, root: Path | str | None = None, prompts: str = ""
) -> tuple[list[Target], list[DataError]]:
    """Open the datasets that a user names; what is missing or broken does not keep the others from being scored.

    Args:
        names: of cards, folders, URLs, and whatever else ``open_dataset`` takes.
        root: where datasets are looked for by their cards' names.
        prompts: the prompt set to use where a card has it; "" for the card's own choice.

    Returns:
        The datasets that are here, and why others cannot be scored on.

    Raises:
        DataError: a name is a slip: there is nothing of that name; or two datasets would have one name.
        ConfigError: there is no folder ``root``.
    """
    _check_root(root)
    cards = [name for name in names if name in card_names() and not Path(name).is_dir()]
    plain = [name for name in names if name not in cards]
    for name in plain:
        if name.replace("-", "_").isidentifier() and name not in BUILTIN and not Path(name).exists():
            raise DataError(
                f"no dataset {name!r}: no folder is called so, and no card ({nearest(name, card_names())})"
            )
    targets: dict[str, Target] = {}
    trouble: list[DataError] = []
    for name in cards:
        try:
            targets[name] = _of_card(load_card(name), root, prompts=prompts, captions=prompts)
        except DataError as error:
            trouble.append(error)
    for source, dataset in _open_plain(plain, root, trouble):
        if dataset.name in {*targets, *cards}:
            raise DataError(f"two datasets would both be named {dataset.name}: rename the folder {source}")
        try:
            targets[dataset.name] = _of_folder(source, dataset, root, prompts)
        except DataError as error:
            trouble.append(error)
    return list(targets.values()), trouble


def _open_plain(
    sources: Sequence[str], root: Path | str | None, trouble: list[DataError]
) -> list[tuple[str, EvalDataset]]:
    """The datasets with their sources; what is wrong with others is added to ``trouble``."""
    try:
        return list(zip(sources, open_datasets(sources, root=root), strict=True))
    except DataError as error:
        if len(sources) == 1:
            trouble.append(error)
            return []
        good = []
        for source in sources:
            try:
                open_dataset(source, root=root)
            except DataError as own:
                if root is None and _is_slip(source):
                    raise
                trouble.append(own)
            else:
                good.append(source)
        if len(good) == len(sources):  # each can be opened alone: it is about their names
            raise
        return _open_plain(good, root, trouble)


def _is_slip(source: str) -> bool:
    """Whether a source would be a path of this machine, and nothing lies there."""
    try:
        return not (":" in source or Path(source).expanduser().exists())
    except (OSError, RuntimeError):  # a name too long; there is no such user
        return True


def find_suites(
    suites: Sequence[str], *, root: Path | str | None = None, prompts: str = ""
) -> tuple[list[Target], list[DataError]]:
    """Open the datasets of suites, each once; what is missing or broken does not keep the others from being scored.

    Args:
        suites: their names.
        root: where datasets are looked for by their cards' names.
        prompts: the prompt set to use where a card has it; "" for the suite's or the card's own choice.

    Returns:
        The datasets that are here, and why others cannot be scored on.

    Raises:
        DataError: there is no such suite.
        ConfigError: there is no folder ``root``.
    """
    _check_root(root)
    targets: dict[str, Target] = {}
    trouble = Trouble(root)
    for name in suites:
        if name not in suite_names():
            raise DataError(f"there is no suite {name!r}: {nearest(name, suite_names())}")
        suite = load_suite(name)
        for card in map(load_card, suite.cards):
            chosen = prompts if prompts in card.prompt_sets else suite.prompts_for(card)
            try:
                found = _of_card(
                    card, root, prompts=chosen, captions=prompts, metrics=suite.metrics_for(card)
                )
            except DataError as error:
                trouble.add(card.name, error)
            else:
                targets.setdefault(card.name, found)
    return list(targets.values()), trouble.lines()


class Trouble:
    """Why datasets cannot be scored on, a line each; but one for all that a store has which nobody answers for."""

    def __init__(self, root: Path | str | None) -> None:
        self._root = root
        self._errors: dict[str, DataError] = {}
        self._unreached: list[str] = []

    def add(self, dataset: str, error: DataError) -> None:
        """Keep what is wrong with a dataset; what was said of it already is not said again."""
        if isinstance(error, Unreachable):
            self._unreached.append(dataset)
        self._errors.setdefault("" if isinstance(error, Unreachable) else str(error), error)

    def lines(self) -> list[DataError]:
        """One for each line, in the order in which they came."""
        return [self._of_store(error) if not key else error for key, error in self._errors.items()]

    def _of_store(self, error: DataError) -> DataError:
        names = list(dict.fromkeys(self._unreached))
        why = str(error).partition(": ")[2] or str(error)  # before it stands the address of the first
        return Unreachable(
            f"{shown(str(self._root))}: {why}; it costs {counted(len(names), 'dataset')}: {some(names)}"
        )


def _check_root(root: Path | str | None) -> None:
    if root is None or is_remote(str(root)):
        return
    try:
        if Path(root).expanduser().is_dir():
            return
    except (OSError, RuntimeError):  # a name too long; there is no such user
        pass
    raise ConfigError(f"--data-root {str(root)[:200]}: there is no such folder")


def _of_card(
    card: Card, root: Path | str | None, *, prompts: str, captions: str, metrics: Sequence[str] = ()
) -> Target:
    """The test split of a card's dataset; ``prompts`` are of its classes, ``captions`` the prompts of those."""
    if not card.tasks:
        raise Lacks(f"{card.name} is known and cannot be scored here: {card.note}")
    opener = _opener(card, root)
    dataset = replace(opener(TEST), name=card.name)
    card.check_size(TEST, len(dataset))
    return Target(
        dataset=_with_caption_prompts(card, _with_prompts(card, dataset, prompts), captions),
        metrics=tuple(metrics or card.metrics),
        card=card,
        keys=dataset.class_names,
        opener=opener,
    )


def _of_folder(source: str, dataset: EvalDataset, root: Path | str | None, prompts: str) -> Target:
    """A dataset without a card, or with one of its own beside its images."""

    own = Path(source).expanduser() / OWN_CARD
    card = read_card(own, name=dataset.name) if own.is_file() else None

    def opener(split: str) -> EvalDataset:
        return open_dataset(source, split=split, root=root, metadata_names=card.metadata if card else ())

    if card is None:
        _tell_default_prompts(dataset)
        return Target(dataset=dataset, keys=dataset.class_names, opener=opener)
    if card.metadata:  # which nobody could know before
        dataset = replace(opener(TEST), name=dataset.name)
    card.check_size(TEST, len(dataset))
    _check_metrics(own, card, dataset)
    return Target(
        dataset=_with_caption_prompts(card, _with_prompts(card, dataset, prompts), prompts),
        metrics=card.metrics,
        card=card,
        keys=dataset.class_names,
        opener=opener,
        own_card=True,
    )


def _check_metrics(file: Path, card: Card, dataset: EvalDataset) -> None:
    """Whether the metrics of a user's card, which fit its tasks, fit the images too.

    Raises:
        DataError: one does not.
    """
    if not card.tasks:
        raise Lacks(f"{file} has no tasks: name those that {card.name} is for")
    if dataset.labels is None:
        return
    several = dataset.labels.dim() == 2
    if several != card.multilabel:
        how = "images have several labels" if several else "each image has one label"
        raise DataError(
            f"{file}: {how}, so it must have multilabel = {str(several).lower()}, and metrics of that"
        )
    kind = MetricKind(
        multilabel=several,
        classes=len(dataset.class_names) or None,
        columns=tuple(dataset.metadata),
        superclasses=bool(dataset.superclasses),
    )
    if must := kind.fault(card.metrics, card.tasks):
        raise DataError(f"{file}: metric and further do not fit the images: each must be {must}")


def _tell_default_prompts(dataset: EvalDataset) -> None:
    if dataset.labels is not None and dataset.templates is DEFAULT_TEMPLATES:
        _log.warning(
            "dataset %s brings no prompts (zeroshot_classification_templates.txt): %r is taken",
            dataset.name,
            DEFAULT_TEMPLATES[0],
        )


def _opener(card: Card, root: Path | str | None) -> Opener:
    """How a card's dataset is opened: a published folder, else parquet files of the hub, else torchvision's files.

    Raises:
        Missing: it is not here.
    """
    known = card.sources
    if known.builtin:
        return lambda split: open_dataset(known.builtin, split=split)
    if root is None:
        raise Missing(f"{card.name}: {_how(card, root)}")
    found = find_published(root, [*known.folders, card.name])
    if found is not None:
        return lambda split: open_dataset(found, split=split, metadata_names=card.metadata)
    if (hub := known.huggingface) is not None and str(root).startswith("hf://"):
        place = f"hf://datasets/{hub.name}"
        return lambda split: open_hugging_face(place, card.name, split=hub.split if split == TEST else split)
    if (sets := known.torchvision) is not None and not is_remote(str(root)):

        def of_torchvision(split: str) -> EvalDataset:
            own = sets.split(split)
            opened = open_torchvision(
                sets.name, Path(root).expanduser(), name=card.name, split=own, arguments=sets.arguments
            )
            return replace(opened, split=split)

        try:
            of_torchvision(TEST)
        except NotFetched as error:
            how = _how(card, root)
            also = "" if "torchvision" in how else f", or as torchvision.datasets.{sets.name} keeps it"
            raise Missing(f"{card.name}: {how}{also}") from error
        return of_torchvision
    raise Missing(f"{card.name}: {_how(card, root)}")


def _how(card: Card, root: Path | str | None) -> str:
    """To get a dataset, in a line."""
    where = f"not under {root}" if root is not None else "say where it lies with --data-root"
    ready = f"published at {card.sources.urls[0]}" if card.sources.urls else card.get or f"see {card.home}"
    other = f"; {card.stand_in} may stand in for it" if card.stand_in else ""
    return f"{where}; {ready}{other}"


def _with_caption_prompts(card: Card, dataset: EvalDataset, prompts: str) -> EvalDataset:
    """The dataset with a prompt of its card for each caption; captions stand as they are where none is named."""
    if dataset.captions is None or prompts not in card.caption_prompts:
        return dataset
    return replace(dataset, caption_template=card.caption_prompts[prompts], caption_prompt_set=prompts)


def _check_labels(card: Card, dataset: EvalDataset, classes: int) -> None:
    """Of a dataset that only numbers its classes nobody could know before how many there should be."""
    if dataset.labels is None or not len(dataset.labels):
        return
    there = dataset.labels.shape[1] if dataset.labels.dim() == 2 else int(dataset.labels.max()) + 1
    if there > classes:
        raise DataError(
            f"card {card.name} has {classes} classes, the images of {dataset.name} are of {there}"
        )


def _with_prompts(card: Card, dataset: EvalDataset, prompts: str) -> EvalDataset:
    """The dataset with a prompt set of its card, the first unless one is named that the card has."""
    chosen = prompts if prompts in card.prompt_sets else next(iter(card.prompt_sets), "")
    if not chosen or not (dataset.class_names or dataset.labels is not None):
        return dataset
    found = card.prompts(chosen, dataset.class_names, dataset.templates)
    _check_labels(card, dataset, len(found.class_names))
    if found.templates is dataset.templates:
        _tell_default_prompts(dataset)
    several = any(len(names) > 1 for names in found.class_names)
    return replace(
        dataset,
        class_names=tuple(names[0] for names in found.class_names),
        synonyms=found.class_names if several else None,
        superclasses=card.superclass_of(dataset.class_names),
        templates=found.templates,
        prompt_set=found.name,
    )
