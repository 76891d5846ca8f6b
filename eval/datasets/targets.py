"""Find the datasets that a user names (cards, folders or suites), open them and bind them to their cards."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.errors import ConfigError, DataError, Unavailable, nearest
from clipkit.files import counted, redact_url, user_path
from clipkit.samples import CLASS_NAMES, are_ids
from clipkit.samples.remote import Unreachable, is_remote
from data.corpora.builtin import BUILTIN, built_in
from eval.datasets.card import (
    OWN_CARD,
    Card,
    MetricKind,
    card_names,
    imagenet_names,
    load_card,
    load_suite,
    read_card,
    suite_names,
)
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, list_some
from eval.readers import OpenOptions, open_dataset, open_each
from eval.readers.benchmarks import read_babel_languages, read_named_languages
from eval.readers.shards import Members, find_published
from eval.readers.torchvision import open_torchvision

_log = logging.getLogger("eval")

Opener = Callable[[str], EvalDataset]  # opens a split
Root = Path | str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A dataset to evaluate on.

    Attributes:
        dataset: the split that is scored, with the prompts of its card.
        metrics: the primary metric first; () without a card.
        card: the dataset's card, if there is one.
        keys: the dataset's own class names.
        opener: opens any of its splits, without the card's names.
        folder: the folder that the user named; "" if the dataset was found by the name of its card.
        own_card: whether the card is next to the images, so that its sizes hold for all splits.
    """

    dataset: EvalDataset
    metrics: tuple[str, ...] = ()
    card: Card | None = None
    keys: tuple[str, ...]
    opener: Opener
    own_card: bool = False
    folder: str = ""

    @property
    def main_tasks(self) -> tuple[str, ...]:
        """The tasks that are run if the user names none."""
        return self.dataset.tasks if self.card is None else self.card.tasks[:1]

    def open_split(self, split: str) -> EvalDataset:
        """Open another split, with the same class names and prompts."""
        opened = self.opener(split)
        scored = self.dataset
        # other cards may describe another edition's training images
        if self.own_card and self.card is not None:
            self.card.check_size(split, len(opened))
        if opened.class_names != self.keys:
            raise DataError(
                f"dataset {scored.name} has other classes in split {split!r} than in split {scored.split!r}, or in "
                "another order"
            )
        return replace(
            opened,
            name=scored.name,
            class_names=scored.class_names,
            synonyms=scored.synonyms,
            prompt_set=scored.prompt_set,
            templates=scored.templates,
            negative_templates=scored.negative_templates,
            superclasses=scored.superclasses,
            taxonomy=scored.taxonomy,
            class_order=scored.class_order,
        )


def find_targets(
    names: Sequence[str], *, root: Root = None, prompts: str = "", members: Members | None = None
) -> list[Target]:
    """Open the datasets that a user names; raise the first of the errors that ``open_available`` returns."""
    targets, errors = open_available(names, root=root, prompts=prompts, members=members)
    if errors:
        raise errors[0]
    return targets


def open_available(
    names: Sequence[str], *, root: Root = None, prompts: str = "", members: Members | None = None
) -> tuple[list[Target], list[DataError]]:
    """Open the datasets that a user names, and skip those that are missing or damaged.

    Args:
        names: names of cards, folders, URLs, and anything else that ``open_dataset`` accepts.
        root: the folder to search for datasets by card name.
        prompts: the prompt set to use where a card has it; "" for the card's own choice.
        members: where images and captions of shards are, for datasets that clipkit has no card of.

    Returns:
        The datasets, and why others cannot be used.

    Raises:
        DataError: a name is misspelled, or two datasets would have the same name.
        ConfigError: there is no folder ``root``.
    """
    _check_root(root)
    cards = [name for name in names if name in card_names() and not Path(name).is_dir()]
    plain = [name for name in names if name not in cards]
    for name in plain:
        if name.replace("-", "_").isidentifier() and name not in BUILTIN and not Path(name).exists():
            raise DataError(
                f"no dataset {name!r}: no such folder, and no such card ({nearest(name, card_names())}); "
                "`python -m eval list` lists the datasets"
            )
    targets: dict[str, Target] = {}
    errors: list[DataError] = []
    for name in cards:
        try:
            targets[name] = _open_card(load_card(name), root, prompts=prompts, captions=prompts)
        except DataError as error:
            errors.append(error)
    options = OpenOptions(root=root, members=members or Members())
    for source, dataset in zip(plain, open_each(plain, options), strict=True):
        if isinstance(dataset, DataError):
            errors.append(dataset)
            continue
        if dataset.name in {*targets, *cards}:
            raise DataError(f"two datasets would both be named {dataset.name}: rename the folder {source}")
        try:
            targets[dataset.name] = _open_folder(source, dataset, root, prompts, members)
        except DataError as error:
            errors.append(error)
    return list(targets.values()), errors


def open_suites(
    suites: Sequence[str], *, root: Root = None, prompts: str = ""
) -> tuple[list[Target], list[DataError]]:
    """Open the datasets of suites, each once, and skip those that are missing or damaged.

    Returns:
        The datasets, and why others cannot be used.
    """
    _check_root(root)
    targets: dict[str, Target] = {}
    errors: list[tuple[str, DataError]] = []
    for suite in map(load_suite, suites):
        for card in map(load_card, suite.cards):
            chosen = prompts if prompts in card.prompt_sets else suite.prompts_for(card)
            try:
                target = _open_card(
                    card, root, prompts=chosen, captions=prompts, metrics=suite.metrics_for(card)
                )
            except DataError as error:
                errors.append((card.name, error))
            else:
                targets.setdefault(card.name, target)
    return list(targets.values()), unite_errors(errors, root)


def find_guards(
    names: Sequence[str], *, members: Members | None = None
) -> tuple[list[Target], list[DataError]]:
    """Open the datasets and suites of ``eval.guard``; those of suites that are missing are returned as errors."""
    suites = [name for name in names if name in suite_names()]
    targets, errors = open_suites(suites)
    targets += find_targets([name for name in names if name not in suites], members=members)
    if names and not targets:
        raise errors[0]
    return list({target.dataset.name: target for target in targets}.values()), errors


def unite_errors(errors: Sequence[tuple[str, DataError]], root: Root) -> list[DataError]:
    """Return errors of datasets without duplicates; all datasets of an unreachable store share one error."""
    united: dict[str, DataError] = {}
    unreached: list[str] = []
    for dataset, error in errors:
        if isinstance(error, Unreachable):
            if dataset not in unreached:
                unreached.append(dataset)
            united.setdefault("", error)
        else:
            united.setdefault(str(error), error)
    if unreached:
        message = str(united[""])
        cause = message.partition(": ")[2] or message  # without the address of the first dataset
        count = counted(len(unreached), "dataset")
        united[""] = Unreachable(
            f"{redact_url(str(root))}: {cause}; {count} not available: {list_some(unreached)}"
        )
    return list(united.values())


def _check_root(root: Root) -> None:
    if root is None or is_remote(str(root)):
        return
    try:
        is_folder = user_path(str(root)).is_dir()
    except OSError:  # the name is too long
        is_folder = False
    if not is_folder:
        raise ConfigError(f"--data-root {str(root)[:200]}: no such folder")


def _open_card(card: Card, root: Root, *, prompts: str, captions: str, metrics: Sequence[str] = ()) -> Target:
    """Open the test split of a card's dataset; ``prompts`` is for its classes, ``captions`` for its captions."""
    if not card.tasks:
        raise Unavailable(f"{card.name} cannot be scored: {card.note}")
    if card.sources.images:
        return _open_names(card, root, prompts)
    opener = _find_opener(card, root)
    dataset = replace(opener(TEST), name=card.name)
    if card.languages not in (None, len(dataset.languages)):
        raise DataError(
            f"dataset {card.name} has {counted(len(dataset.languages), 'language')}, its card says {card.languages}"
        )
    card.check_size(TEST, len(dataset))
    return Target(
        dataset=_add_prompts(card, dataset, prompts, captions),
        metrics=tuple(metrics or card.metrics),
        card=card,
        keys=dataset.class_names,
        opener=opener,
    )


def _open_names(card: Card, root: Root, prompts: str) -> Target:
    """Open a dataset that only has names of another dataset's classes."""
    images = load_card(card.sources.images)
    folder = None if root is None else find_published(root, [card.name])
    if folder is None:
        raise Unavailable(f"{card.name}: {card.get}", cause="missing")
    target = _open_card(images, root, prompts=prompts, captions="")
    labels = [0] * len(images.keys)
    for label, class_index in enumerate(images.match_classes(target.keys or images.keys)):
        labels[class_index] = label
    dataset = replace(target.dataset, name=card.name, languages=read_babel_languages(folder, labels))
    return replace(target, dataset=dataset, metrics=card.metrics, card=card)


def select_languages(target: Target, languages: Sequence[str], *, root: Root = None) -> Target:
    """Restrict a dataset to some languages; class names of ``names.json`` next to its images are read here.

    "all" stands for all languages; () for all that the dataset has besides ``names.json``.
    """
    dataset = target.dataset
    if not languages:
        return target
    texts = dataset.languages
    if not texts and dataset.class_names:
        name = target.card.sources.builtin if target.card is not None else ""
        if not name and dataset.name in BUILTIN:
            name = dataset.name
        texts = read_named_languages(built_in(name) if name else target.folder, dataset)
    if not texts:
        raise Unavailable(f"dataset {dataset.name} has no texts in several languages")
    for language in languages:
        if language not in (*texts, "all"):
            raise Unavailable(
                f"dataset {dataset.name} has no language {language!r}: {nearest(language, texts)}"
            )
    chosen = {name: language for name, language in texts.items() if name in languages or "all" in languages}
    dataset = replace(dataset, languages=chosen)
    return replace(target, dataset=dataset)


def _open_folder(
    source: str, dataset: EvalDataset, root: Root, prompts: str, members: Members | None
) -> Target:
    """Return a dataset that has no card, or its own card next to the images."""
    file = Path(source).expanduser() / OWN_CARD
    card = read_card(file, name=dataset.name) if file.is_file() else None
    if dataset.ratings is not None:
        card = load_card(dataset.name)

    def opener(split: str) -> EvalDataset:
        return open_dataset(source, split=split, root=root, members=members)

    if card is None:
        _warn_about_prompts(dataset)
        return Target(dataset=_name_classes(dataset), keys=dataset.class_names, opener=opener, folder=source)
    card.check_size(TEST, len(dataset))
    if not card.tasks:
        raise Unavailable(f"{file} has no tasks: add those that {card.name} supports")
    if dataset.labels is not None:
        multilabel = dataset.labels.dim() == 2
        if multilabel != card.multilabel:
            how = "images have several labels" if multilabel else "each image has one label"
            raise DataError(
                f"{file}: {how}, so it must have multilabel = {str(multilabel).lower()}, and matching metrics"
            )
        kind = MetricKind(
            multilabel=multilabel,
            classes=len(dataset.class_names) or None,
            columns=tuple(dataset.metadata),
            superclasses=bool(card.superclasses),
            ordered=card.ordered,
            taxonomy=card.taxonomy,
        )
        if misfit := kind.find_misfit(card.metrics, card.tasks):
            raise DataError(f"{file}: {misfit}")
    prompted = _add_prompts(card, dataset, prompts, prompts)
    return Target(
        dataset=prompted,
        metrics=_name_labels(card.metrics, dataset.class_names, prompted.class_names),
        card=card,
        keys=dataset.class_names,
        opener=opener,
        own_card=True,
        folder=source,
    )


def _name_labels(metrics: Sequence[str], keys: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return metrics of single labels, such as "roc_auc_of_KEY", with the names that prompts have for the keys."""
    name_by_key = dict(zip(keys, names, strict=False))  # numbered classes have no keys
    named = []
    for metric in metrics:
        kind, of, label = metric.partition("_of_")
        named.append(f"{kind}{of}{name_by_key.get(label, label)}")
    return tuple(named)


def _name_classes(dataset: EvalDataset) -> EvalDataset:
    """Replace WordNet ids of ImageNet's classes by their names; log this, and class names that are other ids."""
    ids = dataset.class_names
    if not are_ids(ids):
        return dataset
    names = imagenet_names()
    if all(key in names for key in ids):
        named = [f"{key} is {names[key]!r}" for key in ids]
        _log.warning(
            "dataset %s: the names of classes are those of the card imagenet1k: %s",
            dataset.name,
            list_some(named),
        )
        return replace(dataset, class_names=tuple(names[key] for key in ids))
    _log.warning(
        "dataset %s: the names of classes look like ids: %s; write their names into %s, one per line in "
        "ascending order of the ids",
        dataset.name,
        list_some(ids),
        CLASS_NAMES,
    )
    return dataset


def _warn_about_prompts(dataset: EvalDataset) -> None:
    if dataset.labels is not None and dataset.templates is DEFAULT_TEMPLATES:
        _log.warning(
            "dataset %s has no prompts (zeroshot_classification_templates.txt): using %r",
            dataset.name,
            DEFAULT_TEMPLATES[0],
        )


def _find_opener(card: Card, root: Root) -> Opener:
    """Find a card's dataset: a published folder, else parquet files at Hugging Face, else torchvision's files."""
    sources = card.sources
    where = f"not under {root}" if root is not None else "pass its location with --data-root"
    advice = f"published at {sources.urls[0]}" if sources.urls else card.get or f"see {card.home}"
    message = f"{card.name}: {where}; {advice}"
    if card.stand_in:
        message += f"; {card.stand_in} can be used instead"
    if sources.builtin:
        return lambda split: open_dataset(sources.builtin, split=split, metadata_names=card.metadata)
    if root is None:
        raise Unavailable(message, cause="missing")
    folder = find_published(root, [*sources.folders, card.name])
    if folder is not None:
        return lambda split: open_dataset(folder, split=split, metadata_names=card.metadata)
    hub = sources.huggingface
    if hub is not None and str(root).startswith("hf://"):
        url = f"hf://datasets/{hub.name}"
        return lambda split: open_dataset(url, split=hub.split if split == TEST else split)
    library = sources.torchvision
    if library is None or is_remote(str(root)):
        raise Unavailable(message, cause="missing")

    def open_split(split: str) -> EvalDataset:
        folder = user_path(str(root))
        opened = open_torchvision(
            library.name,
            folder,
            name=card.name,
            split=library.splits.get(split, split),
            arguments=library.arguments,
        )
        return replace(opened, split=split)

    try:
        open_split(TEST)
    except Unavailable as error:
        if "torchvision" not in message:
            message += f", or in the layout of torchvision.datasets.{library.name}"
        raise Unavailable(message, cause="missing") from error
    return open_split


def _add_prompts(card: Card, dataset: EvalDataset, prompts: str, captions: str) -> EvalDataset:
    """Add a card's prompts: the named set, or else the first for classes and rated captions, none for captions."""
    if dataset.ratings is not None:
        captions = captions or next(iter(card.caption_prompts))
    if dataset.captions is not None and captions in card.caption_prompts:
        template = card.caption_prompts[captions]
        dataset = replace(dataset, caption_template=template, caption_prompt_set=captions)
    dataset = replace(dataset, taxonomy=card.list_taxonomy(dataset.class_names))
    chosen = prompts if prompts in card.prompt_sets else next(iter(card.prompt_sets), "")
    labels = dataset.labels
    if not chosen or not (dataset.class_names or labels is not None):
        return dataset
    prompt_set = card.prompts(chosen, dataset.class_names, dataset.templates)
    if labels is not None and len(labels):  # a dataset without class names may have any labels
        classes = labels.shape[1] if labels.dim() == 2 else int(labels.max()) + 1
        if classes > len(prompt_set.class_names):
            raise DataError(
                f"card {card.name} has {len(prompt_set.class_names)} classes, the images of {dataset.name} have "
                f"{classes}"
            )
    if prompt_set.templates is dataset.templates:
        _warn_about_prompts(dataset)
    several = any(len(names) > 1 for names in prompt_set.class_names)
    return replace(
        dataset,
        class_names=tuple(names[0] for names in prompt_set.class_names),
        synonyms=prompt_set.class_names if several else None,
        superclasses=card.list_superclasses(dataset.class_names),
        class_order=card.order_classes(dataset.class_names),
        templates=prompt_set.templates,
        negative_templates=prompt_set.negative_templates,
        prompt_set=prompt_set.name,
    )
