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
    files, captions = (_of_json_lines if keyed else _of_text_files)(folder, name)
    if not files or not captions:
        raise DataError(f"dataset {name}: no captions in {folder}")
    for language, own in captions.items():
        empty = next((number for number, texts in enumerate(own) if not texts), None)
        if empty is not None:
            raise DataError(f"dataset {name}: image {files[empty]} has no caption in language {language}")
    within = folder / "images" if (folder / "images").is_dir() else folder
    return check_dataset(
        EvalDataset(
            name=name,
            images=file_images(folder, [within / file for file in files]),
            tasks=("retrieval",),
            captions=captions.get("en") or next(iter(captions.values())),
            languages={language: Language(captions=own) for language, own in captions.items()},
        )
    )


_Captions = dict[str, tuple[tuple[str, ...], ...]]


def _of_json_lines(folder: Path, name: str) -> tuple[list[str], _Captions]:
    files, found = list[str](), dict[str, list[tuple[str, ...]]]()
    text = read_text_file(folder / _CAPTIONS, limit=_MAX_BYTES) or ""
    for number, line in enumerate(filter(str.strip, text.split("\n"))):
        try:
            entry = parse_json(line)
            own = {
                key: tuple(one.strip() for one in value["caption"] if one.strip())
                for key, value in entry.items()
                if isinstance(value, dict)
            }
            files.append(f"{entry['image/key']}.jpg")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"dataset {name}: {folder / _CAPTIONS} line {number + 1}: expected image/key and a list of "
                "captions for each language"
            ) from error
        for language in own if number == 0 else ():
            found[language] = []
        if own.keys() != found.keys():
            different = min(own.keys() ^ found.keys())
            raise DataError(
                f"dataset {name}: {folder / _CAPTIONS} line {number + 1} differs from the first line in language "
                f"{different}"
            )
        for language, captions in own.items():
            found[language].append(captions)
    return files, {language: tuple(own) for language, own in found.items()}


def _of_text_files(folder: Path, name: str) -> tuple[list[str], _Captions]:
    places = [folder / part for part in _FOLDERS]
    files = next(read_lines(place / _IMAGES) for place in places if (place / _IMAGES).is_file())
    texts = sorted(path for place in places for path in place.glob("*.txt") if path.name != _IMAGES)
    texts = [path for path in texts if path.stem.startswith(_PREFIX)] or texts
    found: _Captions = {}
    for path in texts:
        lines = read_lines(path)
        if len(lines) != len(files):
            raise DataError(
                f"dataset {name}: {path} has {len(lines):,} lines, {_IMAGES} has {len(files):,}: expected one "
                "caption per image"
            )
        found[path.stem.removeprefix(_PREFIX)] = tuple((line,) if line else () for line in lines)
    return files, found


def named_languages(folder: Path | str, dataset: EvalDataset) -> Mapping[str, Language]:
    """Read class names by language from ``names.json``; {} if there is no file; prompts are the dataset's."""
    place = join_place(folder, "names.json")
    found = {}
    for language, names in (read_json_file(place, dict[str, list[str]]) or {}).items():
        if len(names) != len(dataset.class_names):
            raise DataError(f"{place}: {language}: expected a list of {len(dataset.class_names)} class names")
        found[language] = Language(class_names=tuple(names), templates=dataset.templates)
    return found


def babel_languages(folder: Path | str, labels: Sequence[int]) -> Mapping[str, Language]:
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
    found = {}
    for language, (numbers, own) in names.items():
        known = {number for number in numbers if 0 <= number < len(labels)}
        if not own or len(known) != len(own) or len(numbers) != len(own):
            raise DataError(f"{names_file}: {language}: expected different class numbers and their names")
        templates = prompts.get(language, ["{}"])  # a few languages have no prompts
        if not templates:
            raise DataError(f"{folder}: prompts of {language}: expected a list of templates")
        found[language.lower()] = Language(
            class_names=tuple(own),
            templates=tuple(one.replace("{}", "{c}") for one in templates),
            labels=tuple(labels[number] for number in numbers),
        )
    return found
