"""What a user names, a dataset, a folder or a suite, as datasets to score on: opened, bound to cards, checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.errors import DataError, nearest
from data.corpora.builtin import BUILTIN
from data.shard_file import is_remote
from eval.cards import Card, card_names, load_card, load_suite, read_card, suite_names
from eval.dataset import TEST, EvalDataset, distinct_names
from eval.readers import find_published, open_dataset, open_datasets
from eval.readers.hugging_face import open_hugging_face
from eval.readers.torchvision_sets import open_torchvision

__all__ = ["OWN_CARD", "Missing", "Target", "by_names", "find_suites", "find_targets"]

OWN_CARD = "card.toml"


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
        own_card: whether the card lies beside the pictures, and so knows all their splits.
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
        if self.own_card and self.card is not None:  # others may be of another edition's training pictures
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


def by_names(target: Target) -> Target:
    """The same for a model that reads class names alone, see ``clipkit.architectures.ClassTable``."""
    names = tuple(distinct_names(target.dataset.class_names))
    bare = replace(target.dataset, class_names=names, synonyms=None, templates=("{c}",), prompt_set="names")
    return replace(target, dataset=bare)


def find_targets(names: Sequence[str], *, root: Path | str | None = None, prompts: str = "") -> list[Target]:
    """Open the datasets that a user names one by one.

    Args:
        names: of cards, folders, URLs, and whatever else ``open_dataset`` takes.
        root: where datasets are looked for by their cards' names.
        prompts: the prompt set to use where a card has it; "" for the card's own choice.

    Raises:
        DataError: one is missing or broken.
    """
    cards = [name for name in names if name in card_names() and not Path(name).is_dir()]
    plain = [name for name in names if name not in cards]
    for name in plain:
        if name.replace("-", "_").isidentifier() and name not in BUILTIN and not Path(name).exists():
            raise DataError(
                f"no dataset {name!r}: no folder is called so, and no card ({nearest(name, card_names())})"
            )
    targets = {name: _of_card(load_card(name), root, prompts=prompts) for name in cards}
    for source, dataset in zip(plain, open_datasets(plain, root=root), strict=True):
        if dataset.name in targets:
            raise DataError(f"two datasets would both be named {dataset.name}: rename the folder {source}")
        targets[dataset.name] = _of_folder(source, dataset, root, prompts)
    return list(targets.values())


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
    """
    targets: dict[str, Target] = {}
    trouble: list[DataError] = []
    for name in suites:
        if name not in suite_names():
            raise DataError(f"there is no suite {name!r}: {nearest(name, suite_names())}")
        suite = load_suite(name)
        for card in map(load_card, suite.cards):
            chosen = prompts if prompts in card.prompt_sets else suite.prompts_for(card)
            try:
                found = _of_card(card, root, prompts=chosen, metrics=suite.metrics_for(card))
            except DataError as error:
                trouble.append(error)
            else:
                targets.setdefault(card.name, found)
    return list(targets.values()), trouble


def _of_card(card: Card, root: Path | str | None, *, prompts: str, metrics: Sequence[str] = ()) -> Target:
    opener = _opener(card, root)
    dataset = replace(opener(TEST), name=card.name)
    card.check_size(TEST, len(dataset))
    return Target(
        dataset=_with_prompts(card, dataset, prompts),
        metrics=tuple(metrics or card.metrics),
        card=card,
        keys=dataset.class_names,
        opener=opener,
    )


def _of_folder(source: str, dataset: EvalDataset, root: Path | str | None, prompts: str) -> Target:
    """A dataset without a card, or with one of its own beside its pictures."""

    def opener(split: str) -> EvalDataset:
        return open_dataset(source, split=split, root=root)

    own = Path(source).expanduser() / OWN_CARD
    if not own.is_file():
        return Target(dataset=dataset, keys=dataset.class_names, opener=opener)
    card = read_card(own, name=dataset.name)
    card.check_size(TEST, len(dataset))
    bound = _with_prompts(card, dataset, prompts)
    return Target(
        dataset=bound,
        metrics=card.metrics,
        card=card,
        keys=dataset.class_names,
        opener=opener,
        own_card=True,
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
        except DataError as error:
            raise Missing(f"{card.name}: {_how(card, root)}; for torchvision: {error}") from error
        return of_torchvision
    raise Missing(f"{card.name}: {_how(card, root)}")


def _how(card: Card, root: Path | str | None) -> str:
    """To get a dataset, in a line."""
    where = f"not under {root}" if root is not None else "say where it lies with --data-root"
    ready = f"published at {card.sources.urls[0]}" if card.sources.urls else card.get or f"see {card.home}"
    other = f"; {card.stand_in} may stand in for it" if card.stand_in else ""
    return f"{where}; {ready}{other}"


def _with_prompts(card: Card, dataset: EvalDataset, prompts: str) -> EvalDataset:
    """The dataset with a prompt set of its card, the first unless one is named that the card has."""
    chosen = prompts if prompts in card.prompt_sets else next(iter(card.prompt_sets), "")
    if not chosen or not (dataset.class_names or dataset.labels is not None):
        return dataset
    found = card.prompts(chosen, dataset.class_names, dataset.templates)
    several = any(len(names) > 1 for names in found.class_names)
    return replace(
        dataset,
        class_names=tuple(names[0] for names in found.class_names),
        synonyms=found.class_names if several else None,
        superclasses=card.superclass_of(dataset.class_names),
        templates=found.templates,
        prompt_set=found.name,
    )
