"""Readers of texts in several languages: Crossmodal-3600, XTD, Babel-ImageNet, and class names in ``names.json``.

- Crossmodal-3600 (Thapliyal et al. 2022): ``captions.jsonl``, in each line ``image/key`` and for each language
  ``{"caption": [...]}``; ``images/KEY.jpg``.
- XTD (Aggarwal and Kale 2020): ``test_image_names.txt`` and, with the same lines, ``test_1kcaptions_LANGUAGE.txt``
  in the folder itself or in ``XTD10``, ``MIC`` and ``STAIR``; or ``LANGUAGE.txt`` for XTD200; images in ``images``.
- Babel-ImageNet (Geigle et al. 2023): ``babel_imagenet.json``, by language class numbers of ImageNet and their
  names, and ``nllb_dist13b_prompts.json``, by language templates with ``{}``.
- ``names.json`` next to the shards of any dataset with classes: by language the names in label order.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from clipkit.errors import DataError
from clipkit.samples import join_place
from eval.datasets.dataset import EvalDataset, Language
from eval.readers.files import check_dataset, file_images, read_json_file, read_lines, read_text_file
from eval.results.records import parse_json

_MAX_BYTES = 1 << 30
_CAPTIONS = "captions.jsonl"
_IMAGES = "test_image_names.txt"
_PREFIX = "test_1kcaptions_"
_FOLDERS = (".", "XTD10", "MIC", "STAIR")


def is_multilingual(folder: Path) -> bool:
    """Return whether a folder has the captions of Crossmodal-3600 or XTD."""
    if any((folder / part / _IMAGES).is_file() for part in _FOLDERS):
        return True
    if not (folder / _CAPTIONS).is_file():
        return False
    with (folder / _CAPTIONS).open("rb") as file:
        return b'"image/key"' in file.readline(1 << 20)


def open_multilingual(folder: Path, name: str) -> EvalDataset:
    """Open a folder of Crossmodal-3600 or XTD; its plain captions are the English or the first ones."""
    keyed = (folder / _CAPTIONS).is_file()
    read_captions = _read_json_lines if keyed else _read_text_files
    files, captions = read_captions(folder, name)
    if not files or not captions:
        raise DataError(f"dataset {name}: no captions in {folder}")
    languages: dict[str, Language] = {}
    for language, texts in captions.items():
        if () in texts:
            file = files[texts.index(())]
            raise DataError(f"dataset {name}: image {file} has no caption in language {language}")
        languages[language] = Language(captions=texts)
    images = folder / "images" if (folder / "images").is_dir() else folder
    return check_dataset(
        EvalDataset(
            name=name,
            images=file_images(folder, list(map(images.joinpath, files))),
            tasks=("retrieval",),
            captions=captions.get("en") or next(iter(captions.values())),
            languages=languages,
        )
    )


# by language, the captions of each image
_Captions = dict[str, tuple[tuple[str, ...], ...]]


def _read_json_lines(folder: Path, name: str) -> tuple[list[str], _Captions]:
    file = folder / _CAPTIONS
    images: list[str] = []
    captions: dict[str, list[tuple[str, ...]]] = {}
    text = read_text_file(file, limit=_MAX_BYTES) or ""
    for number, line in enumerate(filter(str.strip, text.split("\n")), start=1):
        texts: dict[str, list[str]] = {}
        try:
            entry = parse_json(line)
            for language, value in entry.items():
                if isinstance(value, dict):
                    texts[language] = list(filter(None, map(str.strip, value["caption"])))
            images.append(f"{entry['image/key']}.jpg")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"dataset {name}: {file} line {number}: expected image/key and a list of captions for each language"
            ) from error
        if len(images) == 1:
            captions = {language: [] for language in texts}
        if texts.keys() != captions.keys():
            different = min(texts.keys() ^ captions.keys())
            raise DataError(
                f"dataset {name}: {file} line {number} differs from the first line in language {different}"
            )
        for language in texts:
            captions[language].append(tuple(texts[language]))
    return images, {language: tuple(texts) for language, texts in captions.items()}


def _read_text_files(folder: Path, name: str) -> tuple[list[str], _Captions]:
    files: list[str] | None = None
    paths: list[Path] = []
    for inside in _FOLDERS:
        paths += (folder / inside).glob("*.txt")
        if files is None and (folder / inside / _IMAGES).is_file():
            files = read_lines(folder / inside / _IMAGES)
    assert files is not None
    paths = [path for path in paths if path.name != _IMAGES]
    paths = [path for path in paths if path.stem.startswith(_PREFIX)] or paths
    captions: _Captions = {}
    for path in sorted(paths):
        lines = read_lines(path)
        if len(lines) != len(files):
            raise DataError(
                f"dataset {name}: {path} has {len(lines):,} lines, {_IMAGES} has {len(files):,}: expected one "
                "caption per image"
            )
        captions[path.stem.removeprefix(_PREFIX)] = tuple((line,) if line else () for line in lines)
    return files, captions


def read_named_languages(folder: Path | str, dataset: EvalDataset) -> Mapping[str, Language]:
    """Read class names by language from ``names.json``; {} if there is no file; prompts are the dataset's."""
    file = join_place(folder, "names.json")
    languages = {}
    for language, names in (read_json_file(file, dict[str, list[str]]) or {}).items():
        if len(names) != len(dataset.class_names):
            raise DataError(f"{file}: {language}: expected a list of {len(dataset.class_names)} class names")
        languages[language] = Language(class_names=tuple(names), templates=dataset.templates)
    return languages


def read_babel_languages(folder: Path | str, labels: Sequence[int]) -> Mapping[str, Language]:
    """Read Babel-ImageNet's class names and prompts.

    Args:
        folder: the folder of the two files.
        labels: by class of ImageNet, its label in the images.
    """
    names_file = join_place(folder, "babel_imagenet.json")
    names = read_json_file(names_file, dict[str, tuple[list[int], list[str]]])
    prompts = read_json_file(join_place(folder, "nllb_dist13b_prompts.json"), dict[str, list[str]])
    if names is None or prompts is None:
        raise DataError(f"{folder}: expected babel_imagenet.json and nllb_dist13b_prompts.json")
    languages = {}
    for language, (classes, class_names) in names.items():
        valid = set(classes) & set(range(len(labels)))
        if not class_names or not len(valid) == len(classes) == len(class_names):
            raise DataError(f"{names_file}: {language}: expected different class numbers and their names")
        templates = prompts.get(language, ["{}"])  # a few languages have no prompts
        if not templates:
            raise DataError(f"{folder}: prompts of {language}: expected a list of templates")
        languages[language.lower()] = Language(
            class_names=tuple(class_names),
            templates=tuple(template.replace("{}", "{c}") for template in templates),
            labels=tuple(labels[i] for i in classes),
        )
    return languages
