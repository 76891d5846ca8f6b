"""Which tokenizer belongs to a ``CLIPModel`` that lies in a folder of transformers: CLIP's own, or the folder's.

clipkit's tokenizer is taken only where the folder has the same one, or none at all. Any other runs by transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipkit.architectures import TextTower
from clipkit.errors import CheckpointError, ConfigError
from clipkit.text_input import ClipTokenizer, Tokenizer, TransformersTokenizer
from clipkit.tokenizer import END_OF_TEXT, START_OF_TEXT, pair_merges, tokenize, tokens_in_order

__all__ = ["ANY_END", "end_of_texts", "folder_tokenizer", "has_tokenizer"]

ANY_END = 2  # in files from before transformers read this setting; the largest token of a text is meant
_LARGEST = 16 * 2**20  # bytes of a file; CLIP's largest has 3.6 MB
_CLIPS_CLASSES = (
    None, "CLIPTokenizer", "CLIPTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
)  # fmt: skip
_SPECIAL = {START_OF_TEXT: "<|startoftext|>", END_OF_TEXT: "<|endoftext|>"}
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "*.model")
# nothing that clipkit repairs and others do not
_PROBES = ("A photo of the Cat's 12 dogs, they'll run!", "x  Y\tz", "eine Straße", "猫の写真", "")


def has_tokenizer(folder: Path) -> bool:
    """Whether there are files of a tokenizer at all."""
    return any(any(folder.glob(name)) for name in _FILES)


def folder_tokenizer(folder: Path, text: TextTower, end: int) -> Tokenizer:
    """The tokenizer of the folder's model, for our own text tower, which reads a text at its largest token.

    Args:
        folder: of transformers.
        text: the text tower.
        end: the token at which transformers reads a text, config.json's ``eos_token_id``.

    Raises:
        CheckpointError: the texts would be read at another token than transformers does.
    """
    if not has_tokenizer(folder) or _is_clips(folder):
        if text.vocab_size <= END_OF_TEXT:
            raise CheckpointError(
                f"config.json: vocab_size = {text.vocab_size} is less than CLIP's tokenizer has"
            )
        if end not in (ANY_END, END_OF_TEXT):
            raise CheckpointError(
                f"config.json: texts are read at token {end}, and CLIP's tokenizer ends them with {END_OF_TEXT}"
            )
        return ClipTokenizer(context_length=text.context_length)
    own = TransformersTokenizer(source=str(folder), context_length=text.context_length)
    try:
        _check(own, text, end)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return own


def _check(own: TransformersTokenizer, text: TextTower, end: int) -> None:
    largest = max(own.library().get_vocab().values(), default=0)
    if largest >= text.vocab_size:
        raise CheckpointError(
            f"its tokenizer has tokens up to {largest}, and config.json says vocab_size = {text.vocab_size}"
        )
    if end != ANY_END and end_of_texts(own) != end:
        raise CheckpointError(
            f"config.json: texts are read at token {end}, which is not the one that its tokenizer ends them "
            "with, or not its largest"
        )


def end_of_texts(own: TransformersTokenizer) -> int | None:
    """The token with which all texts end, cut or not, if it is the largest that there is; else None."""
    largest = max(own.library().get_vocab().values(), default=0)
    ends = {row[-1] if row else None for row in own.rows([*_PROBES, "a " * 2000])}
    return largest if ends == {largest} else None


def _is_clips(folder: Path) -> bool:
    """Whether the folder's tokenizer is CLIP's own; what cannot be told is not."""
    try:
        settings = _object(folder / "tokenizer_config.json")
        added = {str(key) for key in settings.get("added_tokens_decoder") or {}}
        added |= {str(one) for one in _object(folder / "added_tokens.json").values()}
        if settings.get("tokenizer_class") not in _CLIPS_CLASSES or settings.get("auto_map"):
            return False
        if added - {str(number) for number in _SPECIAL}:
            return False
        if (folder / "tokenizer.json").is_file():
            return _is_clips_json(_text(folder / "tokenizer.json"))
        if (folder / "vocab.json").is_file() or (folder / "merges.txt").is_file():
            merges = [line for line in _text(folder / "merges.txt").splitlines() if line.strip()]
            merges = merges[1:] if merges[:1] and merges[0].startswith("#version") else merges
            return _is_clips_vocabulary(_object(folder / "vocab.json"), merges)
        return not any(any(folder.glob(name)) for name in ("vocab.txt", "*.model"))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return False


def _is_clips_json(content: str) -> bool:
    stored = json.loads(content)
    model = stored["model"]
    if not _is_clips_vocabulary(model["vocab"], model["merges"]):
        return False
    if {one["id"] for one in stored["added_tokens"]} - _SPECIAL.keys():
        return False
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_str(content)
    except Exception:  # the Rust library raises nothing more special
        return False
    made.no_truncation()
    made.no_padding()
    expected = [[number for number in row if number] for row in tokenize(_PROBES).tolist()]
    return [one.ids for one in made.encode_batch(list(_PROBES))] == expected


def _is_clips_vocabulary(vocabulary: Mapping[str, Any], merges: list[Any]) -> bool:
    tokens = [*tokens_in_order(), *_SPECIAL.values()]
    if vocabulary != {token: number for number, token in enumerate(tokens)}:
        return False
    pairs = [tuple(one.split(" ") if isinstance(one, str) else one) for one in merges]
    return pairs == pair_merges()


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(_text(path)) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold an object")
    return value


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path} is too large to be CLIP's")
    return path.read_text(encoding="utf-8")
