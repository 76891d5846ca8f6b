"""What a user names, a dataset, a folder or a suite, as datasets to score on: opened, bound to cards, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.errors import ClipkitError, DataError, nearest
from eval.cards import Card, card_names, load_card, load_suite, read_card, suite_names
from eval.dataset import TEST, EvalDataset
from eval.readers import find_published, open_dataset, open_datasets

__all__ = ["Missing", "Target", "find_targets"]

_OWN_CARD = "card.toml"


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A dataset that is not to be had here.

    Attributes:
        name: of it.
        how: to get it, in a line.
    """

    name: str
    how: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A dataset to score on, the split for it opened.

    Attributes:
        dataset: the split that is scored, with the prompts of its card.
        metrics: the primary metric first; none where there is no card.
        card: what is known of it, if anything is.
        keys: what the dataset itself calls its classes.
        source: what it was opened from.
        root: where it was looked for.
    """

    dataset: EvalDataset
    metrics: tuple[str, ...] = ()
    card: Card | None = None
    keys: tuple[str, ...]
    source: str
    root: Path | str | None = None

    def open_split(self, split: str) -> EvalDataset:
        """Another split of the same dataset, its classes numbered as here.

        Raises:
            NoSplit: there is none.
            DataError: it is broken, or its classes are others.
        """
        found = _open(self.source, split, self.root, self.card)
        if found.class_names != self.keys:
            raise DataError(
                f"dataset {self.dataset.name} has other classes in split {split!r} than in split "
                f"{self.dataset.split!r}, or in another order"
            )
        bound = self.dataset
        return replace(
            found, name=bound.name, class_names=bound.class_names, synonyms=bound.synonyms,
            prompt_set=bound.prompt_set, templates=bound.templates,
        )  # fmt: skip


def find_targets(
    names: Sequence[str],
    suites: Sequence[str] = (),
    *,
    root: Path | str | None = None,
    prompts: str = "",
) -> tuple[list[Target], list[Missing | ClipkitError]]:
    """Open what a user wants to score on.

    Args:
        names: datasets: names of cards, folders, URLs, and whatever else ``open_dataset`` takes.
        suites: names of suites.
        root: where datasets are looked for by their cards' names.
        prompts: the prompt set to use where a card has it; "" for the suite's or the card's own choice.

    Returns:
        The targets, and what cannot be scored on: datasets of a suite that are not here, or broken. Of those
        that are named one by one, the first that cannot be is raised.

    Raises:
        DataError: a dataset that is named is missing or broken, or there is no such suite.
    """
    targets: dict[str, Target] = {}
    trouble: list[Missing | ClipkitError] = []
    plain: list[str] = []
    for name in names:
        if name in card_names() and not Path(name).is_dir():
            target = _of_card(load_card(name), root, prompts=prompts)
            if isinstance(target, Missing):
                raise DataError(f"dataset {name} is not here: {target.how}")
            targets[target.dataset.name] = target
        else:
            plain.append(name)
    for source, dataset in zip(plain, open_datasets(plain, root=root), strict=True):
        if dataset.name in targets:
            raise DataError(f"two datasets would both be named {dataset.name}: rename the folder {source}")
        targets[dataset.name] = _of_folder(source, dataset, root, prompts)
    for suite in suites:
        if suite not in suite_names():
            raise DataError(f"there is no suite {suite!r}: {nearest(suite, suite_names())}")
        known = load_suite(suite)
        for name in known.cards:
            card = load_card(name)
            chosen = prompts if prompts in card.prompt_sets else known.prompts_for(card)
            try:
                found = _of_card(card, root, prompts=chosen, metrics=known.metrics_for(card))
            except DataError as error:
                trouble.append(error)
                continue
            if isinstance(found, Missing):
                trouble.append(found)
            else:
                targets.setdefault(name, found)
    return list(targets.values()), trouble


def _of_card(
    card: Card, root: Path | str | None, *, prompts: str, metrics: Sequence[str] = ()
) -> Target | Missing:
    source = _source(card, root)
    if source is None:
        return Missing(name=card.name, how=_how(card, root))
    dataset = replace(_open(source, TEST, root, card), name=card.name)
    _check_size(card, dataset)
    return Target(
        dataset=_with_prompts(card, dataset, prompts),
        metrics=tuple(metrics or card.metrics),
        card=card,
        keys=dataset.class_names,
        source=source,
        root=root,
    )


def _of_folder(source: str, dataset: EvalDataset, root: Path | str | None, prompts: str) -> Target:
    """A dataset without a card, or with one of its own beside its pictures."""
    own = Path(source).expanduser() / _OWN_CARD
    if not own.is_file():
        return Target(dataset=dataset, keys=dataset.class_names, source=source, root=root)
    card = read_card(own, name=dataset.name)
    _check_size(card, dataset)
    bound = _with_prompts(card, dataset, prompts)
    return Target(
        dataset=bound, metrics=card.metrics, card=card, keys=dataset.class_names, source=source, root=root
    )


def _source(card: Card, root: Path | str | None) -> str | None:
    if card.sources.builtin:
        return card.sources.builtin
    if root is None:
        return None
    names = [name for name in (card.sources.clip_benchmark, card.sources.datacomp, card.name) if name]
    return find_published(root, names)


def _how(card: Card, root: Path | str | None) -> str:
    """To get a dataset, in a line."""
    if root is not None:
        return f"not under {root}; {card.get or f'see {card.home}'}"
    known = card.sources.clip_benchmark
    ready = " (hf://datasets/clip-benchmark has it ready to read)" if known else ""
    return f"say where it lies with --data-root{ready}; {card.get or f'see {card.home}'}"


def _open(source: str, split: str, root: Path | str | None, card: Card | None) -> EvalDataset:
    dataset = open_dataset(
        source, split=split, root=root, metadata_names=card.metadata if card is not None else ()
    )
    if card is not None and split != TEST:
        _check_size(card, dataset)
    return dataset


def _check_size(card: Card, dataset: EvalDataset) -> None:
    """A score of another number of pictures is of another dataset, or of part of one."""
    stated = card.splits.get(dataset.split)
    if stated is not None and stated != len(dataset):
        raise DataError(
            f"dataset {card.name} has {len(dataset)} pictures in split {dataset.split!r}, its card says {stated}: "
            "get the whole of it, or name its folder itself if it is another edition"
        )


def _with_prompts(card: Card, dataset: EvalDataset, prompts: str) -> EvalDataset:
    """The dataset with a prompt set of its card, the first unless one is named that the card has."""
    chosen = prompts if prompts in card.prompt_sets else next(iter(card.prompt_sets), "")
    if not chosen or not dataset.class_names:
        return dataset
    found = card.prompts(chosen, dataset.class_names, dataset.templates)
    several = any(len(names) > 1 for names in found.class_names)
    return replace(
        dataset,
        class_names=tuple(names[0] for names in found.class_names),
        synonyms=found.class_names if several else None,
        templates=found.templates,
        prompt_set=found.name,
    )
