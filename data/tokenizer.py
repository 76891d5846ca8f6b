"""Train a tokenizer on the captions of shards: ``python -m data tokenizer``.

It is a byte-level BPE of lower-case text, so it encodes every language. Start and end of text are the last two
tokens, as clipkit's text transformer reads a text at its largest token.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from clipkit.errors import DataError
from clipkit.files import CountProgress
from clipkit.samples.remote import shard_cache
from data.captions import CaptionRule, Filter
from data.options import TokenizerOptions
from data.selection import SelectedShard, Selection
from data.shards.manifest import make_manifest
from data.shards.samples import find_all_shards

_START = "<|startoftext|>"
_END = "<|endoftext|>"
LEAST = 256 + 2  # the bytes, and start and end of text


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Return a tokenizer with at most ``vocab`` tokens, at least ``LEAST``."""
    assert vocab >= LEAST
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    # a word has the same tokens at the start of a text as within it
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_START, _END])
    special = [(token, tokenizer.token_to_id(token)) for token in (_START, _END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_START} $A {_END}", special_tokens=special
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that transformers and ``model.tokenizer`` read; ``folder`` must not exist, or be empty."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _START,
        "eos_token": _END,
        "pad_token": _END,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.partial-") as inside:
        aside = Path(inside, "tokenizer")
        aside.mkdir()
        (aside / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (aside / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        aside.replace(folder)  # an empty folder, too


def run_tokenizer(options: TokenizerOptions) -> int:
    """Run ``python -m data tokenizer``."""
    out = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists and is not empty: use a new folder, or remove it first")
    rule = CaptionRule(fields=options.captions, choice="all")
    selection = Selection(need=("caption",), filters=tuple(map(Filter.of, options.filters)), captions=rule)
    shards = find_all_shards(options.sources, split=options.split)
    cache = shard_cache(options.sources, options.cache_gb)
    manifest = make_manifest([shards], selection, cache=cache, stats=False)
    count = int(manifest.counts.sum())

    def texts() -> Iterator[str]:
        done = 0
        for file in shards:
            shard = SelectedShard(file, selection, cache)
            for i in range(len(shard)):
                row = shard.row(i)
                members = shard.read_present(row, rule.select_members(shard.index.members(row)))
                flat = [*chain.from_iterable(rule.captions_by_field(rule.parse(members)))]
                yield flat[shard.caption_number(i)]
                done += 1
                progress.show(done, 0)

    with CountProgress("reading captions", total=count, shown=not options.quiet) as progress:
        tokenizer = train_tokenizer(texts(), options.vocab)
    write_tokenizer(tokenizer, out)
    print(f"wrote {out}: {tokenizer.get_vocab_size():,} tokens from {count:,} captions")
    return 0
