"""Compare the speed of clipkit's tokenizer with open_clip's, with identical ids.

    python -m bench.tokenizer [--captions 10000] [--rounds 7]

Captions are generated deterministically: words of CLIP's vocabulary drawn by Zipf's law, words outside the
vocabulary, numbers, codes and punctuation, in the proportions of ``MIXTURE``. There are three sets: web (8%
of captions contain characters beyond ASCII), ASCII only, and characters beyond ASCII in every caption. For
each set, in a separate process, both tokenizers (both cache words) first see one warm-up batch; then each
round measures both, in alternating order, on one new batch, on one core, in CPU seconds. Ids are compared in
every round. The ratio is the median over rounds.

Bounds. open_clip: ftfy's steps for each text, the ``regex`` module, a Python loop over words and a tensor;
byte-pair encoding in Python for each new word. clipkit: a split and one lookup per part between spaces, and
more for new parts, most of all for words that are not a single vocabulary entry, which ``tokenizers`` encodes
in Rust; single entries are known from the start. The result includes these bounds: the time of
``ftfy.fix_text`` alone, of a batch that clipkit has seen before, of Python's ``lower`` and ``split`` alone,
and the fraction of new parts. Beyond ASCII, ftfy's steps for each text, ``regex`` and longer encodings are
added.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import ftfy
import open_clip
import torch
from torch import Tensor

from clipkit import tokenize

RESULTS = Path(__file__).parent / "results"
# fraction of captions with characters beyond ASCII
SETS = {"web": 0.08, "ascii": 0.0, "beyond_ascii": 1.0}
# the most frequent words; the order of the vocabulary starts with short word endings
FREQUENT = [
    "the", "of", "and", "a", "in", "to", "for", "with", "on", "by", "is", "at", "from", "an", "new",
    "photo", "image", "stock", "picture", "view", "black", "white", "woman", "man", "girl", "young", "old",
    "vector", "illustration", "background", "free", "home", "house", "design", "art", "vintage", "wooden",
    "red", "blue", "green", "light", "dark", "city", "street", "beach", "water", "mountain", "sky",
    "sunset", "night", "day", "summer", "winter", "wedding", "dress", "shirt", "women", "men", "kids",
    "baby", "dog", "cat", "car", "food", "kitchen", "room", "living", "bedroom", "table", "chair", "wall",
    "door", "window", "garden", "flower", "tree", "park", "world", "map", "logo", "icon", "set", "pattern",
    "texture", "paper", "card", "book", "cover", "poster", "print", "sale", "price", "best", "top",
    "online", "download", "how", "you", "your", "my", "this", "that", "it", "are", "be", "or", "as", "his",
    "her", "their", "our", "all", "one", "two", "three", "first", "last", "big", "small", "large",
]  # fmt: skip
KINDS_OF_WORDS = {
    "of the vocabulary": 0.911,
    "joined of 2 or 3 pieces": 0.03,
    "number": 0.045,
    "code": 0.01,
    "&": 0.004,
}
MARKS = {"": 0.865, ",": 0.06, "'s": 0.02, " -": 0.02, ".": 0.015, ":": 0.01, " |": 0.01}
CASES = {"lower": 0.4, "first letter": 0.25, "every word": 0.32, "upper": 0.03}
KINDS_BEYOND = {
    "typographic quotes, apostrophes, dashes, ellipses": 0.35,
    "accented Latin letters": 0.2,
    "HTML entities": 0.15,
    "emoji": 0.12,
    "signs": 0.05,
    "Cyrillic or Greek": 0.05,
    "Chinese, Japanese or Korean": 0.04,
    "Arabic, Hebrew, Hindi or Thai": 0.02,
    "UTF-8 read as Windows-1252": 0.02,
}
MIXTURE = {
    "words_per_caption": "gamma of shape 4 and mean 11, rounded, at least 2",
    "rank_of_vocabulary_word": "probability in proportion to 1 / (rank + 3)",
    "words": KINDS_OF_WORDS,
    "after_a_word": MARKS,
    "capitals": CASES,
    "beyond_ascii": KINDS_BEYOND,
}
ACCENTS = str.maketrans("aeiounc", "áéíöüñç")
EMOJI = ["😀", "❤️", "🔥", "👍🏽", "🇫🇷", "👩‍👩‍👧", "✨", "🐶", "☀️", "🎄"]
ENTITIES = ["&amp;", "&quot;", "&#39;", "&nbsp;", "&lt;br&gt;", "&eacute;", "&ndash;", "&amp;amp;"]
SIGNS = ["®", "™", "°C", "€", "£", "©", "½", "²"]
EUROPE = ["абвгдежзиклмнопрстуя", "αβγδεζηικλμνοπρστυω"]
EAST_ASIA = [(0x4E00, 0x5E00), (0x3041, 0x3094), (0xAC00, 0xB400)]
OTHERS = [(0x0627, 0x063A), (0x05D0, 0x05EA), (0x0915, 0x0939), (0x0E01, 0x0E2E)]


@cache
def vocabulary() -> tuple[list[str], list[float], list[str]]:
    """Return words, most frequent first, their cumulative weights, and pieces of words."""
    tokens = [token for token in open_clip.SimpleTokenizer().encoder if token.isascii()]
    words = [
        token[:-4] for token in tokens if token.endswith("</w>") and token[:-4].isalpha() and len(token) > 7
    ]
    words = list(dict.fromkeys([*FREQUENT, *words]))
    pieces = [token for token in tokens if token.isalpha() and len(token) > 1]
    return words, list(accumulate(1 / (rank + 3) for rank in range(len(words)))), pieces


def one_of(draw: random.Random, fractions: dict[str, float]) -> str:
    return draw.choices(list(fractions), list(fractions.values()))[0]


def some_word(draw: random.Random) -> str:
    words, weights, pieces = vocabulary()
    kind = one_of(draw, KINDS_OF_WORDS)
    number, code = int(draw.lognormvariate(4, 2.5)), draw.randint(100, 99999)
    if kind == "of the vocabulary":
        return draw.choices(words, cum_weights=weights)[0]
    if kind == "joined of 2 or 3 pieces":
        return "".join(draw.choices(pieces, k=draw.randint(2, 3)))
    if kind == "number":
        return draw.choice(
            [f"{number}", f"{number}", str(draw.randint(1950, 2025)), f"${number}", f"{number}%"]
        )
    if kind == "code":
        return draw.choice(
            [f"IMG_{code}.jpg", f"#{code}", f"DSC-{code}", f"{code}x{code // 2}", f"www.s{code}.com"]
        )
    return kind


def plain(draw: random.Random) -> list[str]:
    """Generate the words of an ASCII caption, with punctuation."""
    words = [some_word(draw) for _ in range(max(2, round(draw.gammavariate(4, 11 / 4))))]
    case = one_of(draw, CASES)
    if case == "upper":
        words = [word.upper() for word in words]
    elif case == "every word":
        words = [word.capitalize() for word in words]
    elif case == "first letter":
        words[0] = words[0].capitalize()
    return [word + one_of(draw, MARKS) for word in words]


def letters(draw: random.Random, blocks: list[tuple[int, int]]) -> str:
    first, last = draw.choice(blocks)
    return "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(2, 9)))


def beyond_ascii(draw: random.Random, words: list[str]) -> list[str]:
    """Insert one of ``KINDS_BEYOND`` into a caption, or replace the caption."""
    at = draw.randrange(len(words))
    word = words[at]
    kind = one_of(draw, KINDS_BEYOND)
    if kind.startswith("typographic"):
        words[at] = draw.choice(["“{}”", "{}’s", "{} –", "{}…", "— {}", "‘{}’"]).format(word)
    elif kind.startswith("accented"):
        words[at] = word.translate(ACCENTS)
        words.insert(at, draw.choice(["café", "São", "Málaga", "für", "señor", "Zürich", "forêt", "Curaçao"]))
    elif kind == "HTML entities":
        words[at] = draw.choice(["{} {}", "{}{}", "{1}{0}{1}"]).format(word, draw.choice(ENTITIES))
    elif kind == "emoji":
        words[at] = word + draw.choice([" ", ""]) + "".join(draw.choices(EMOJI, k=draw.randint(1, 3)))
    elif kind == "signs":
        words[at] = word + draw.choice(SIGNS)
    elif kind.startswith("Cyrillic"):
        alphabet = draw.choice(EUROPE)
        words = ["".join(draw.choices(alphabet, k=draw.randint(2, 9))) for _ in words]
    elif kind.startswith("Chinese"):
        words = [letters(draw, EAST_ASIA) for _ in words[: draw.randint(1, 4)]]
    elif kind.startswith("Arabic"):
        words = [letters(draw, OTHERS) for _ in words]
    else:
        words[at] = draw.choice(["it’s", "café", "“new”", "5 €"]).encode().decode("cp1252", errors="replace")
    return words


def captions(count: int, fraction: float, seed: str) -> list[str]:
    """Generate captions; ``fraction`` of them contain characters beyond ASCII."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        words = plain(draw)
        made.append(" ".join(beyond_ascii(draw, words) if draw.random() < fraction else words))
    return made


def timed(tool: Callable[[list[str]], Any], texts: list[str]) -> tuple[float, Any]:
    began = time.process_time()
    result = tool(texts)
    return time.process_time() - began, result


def repairs(texts: list[str]) -> list[str]:
    return [ftfy.fix_text(text) for text in texts]


def splits(texts: list[str]) -> list[list[str]]:
    return [text.lower().split(" ") for text in texts]


def measure(name: str, count: int, rounds: int) -> dict[str, Any]:
    """Measure one set of captions: seconds of each round, and bounds."""
    use_one_core()
    tools: dict[str, Callable[[list[str]], Tensor]] = {
        "clipkit": tokenize,
        "open_clip": open_clip.get_tokenizer("ViT-B-32"),
    }
    warm_up = captions(count, SETS[name], f"{name}, warm-up")
    seen = {part for parts in splits(warm_up) for part in parts}
    for run in tools.values():
        run(warm_up)
    seconds: dict[str, list[float]] = {tool: [] for tool in [*tools, "ftfy", "clipkit_again", "split"]}
    new, words, beyond = [], [], []
    for i in range(rounds):
        texts = captions(count, SETS[name], f"{name}, round {i}")
        ids = {}
        for tool in sorted(tools, reverse=bool(i % 2)):
            taken, ids[tool] = timed(tools[tool], texts)
            seconds[tool].append(taken)
        assert torch.equal(ids["clipkit"], ids["open_clip"]), "the ids differ"
        seconds["ftfy"].append(timed(repairs, texts)[0])
        seconds["clipkit_again"].append(timed(tools["clipkit"], texts)[0])
        seconds["split"].append(timed(splits, texts)[0])
        parts = [part for parts in splits(texts) for part in parts]
        new.append(sum(part not in seen for part in parts) / len(parts))
        seen.update(parts)
        words.append(len(parts) / count)
        beyond.append(sum(not text.isascii() or "&" in text for text in texts) / count)
        print(f"{name}, round {i + 1}: " + ", ".join(f"{k} {v[-1]:.3f} s" for k, v in seconds.items()))
    medians = {tool: statistics.median(times) for tool, times in seconds.items()}
    by_round = [b / a for a, b in zip(seconds["clipkit"], seconds["open_clip"], strict=True)]
    return {
        "ratio": statistics.median(by_round),
        "ratio_range": [min(by_round), max(by_round)],
        "ratio_by_round": by_round,
        "captions_per_second": {tool: count / medians[tool] for tool in tools},
        "microseconds_per_caption": {tool: median / count * 1e6 for tool, median in medians.items()},
        "share_of_new_parts_by_round": new,
        "parts_per_caption": statistics.fmean(words),
        "share_with_ampersand_or_beyond_ascii": statistics.fmean(beyond),
        "seconds": seconds,
    }


def use_one_core() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--captions", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tasks = [(name, options.captions, options.rounds) for name in SETS]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        sets = dict(zip(SETS, pool.starmap(measure, tasks, chunksize=1), strict=True))
    result = {
        "captions": options.captions,
        "share_beyond_ascii": SETS,
        "mixture": MIXTURE,
        "cores": 1,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        "sets": sets,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tokenizer.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, one in sets.items():
        low, high = one["ratio_range"]
        rates = ", ".join(
            f"{tool} {rate:,.0f} captions/s" for tool, rate in one["captions_per_second"].items()
        )
        print(f"{name}: {rates}, ratio {one['ratio']:.1f} ({low:.1f} to {high:.1f} over rounds)")


if __name__ == "__main__":
    main()
