"""Interface to open_clip_torch, including its internals; no other file of clipkit imports it.

Tested with open_clip 3.3; ``pyproject.toml`` excludes version 4, which is untested. Functions import open_clip when
called, because the import takes seconds; functions that only need a file of the package do not import it.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

ENCODER = (
    "text_encoder"  # folder in an export of clipkit with the configuration of an encoder of transformers
)


def _find_package() -> Path:
    package = importlib.util.find_spec("open_clip")  # without importing it
    assert package is not None and package.origin is not None
    return Path(package.origin).parent


def vocabulary_file() -> Path:
    """Return the gzipped text file with the merges of CLIP's byte-pair encoding."""
    return _find_package() / "bpe_simple_vocab_16e6.txt.gz"


@cache
def config_files() -> dict[str, Path]:
    """Return the configuration files, by name, of architectures with an image tower and a text tower."""
    return {name: path for name, (path, complete) in _all_config_files().items() if complete}


def lacks_image_tower(name: str) -> bool:
    """Return whether an open_clip configuration describes another kind of model, such as an audio encoder."""
    return name in _all_config_files() and name not in config_files()


@cache
def _all_config_files() -> dict[str, tuple[Path, bool]]:
    files = sorted((_find_package() / "model_configs").glob("*.json"))
    needed = {"embed_dim", "vision_cfg", "text_cfg"}
    return {
        path.stem: (path, needed <= json.loads(path.read_text(encoding="utf-8")).keys()) for path in files
    }


def build_towers(
    embed_dim: int, vision: Mapping[str, Any], text: Mapping[str, Any], *, quick_gelu: bool
) -> "tuple[nn.Module, nn.Module]":
    """Build the towers of a ``CustomTextCLIP`` with fresh weights; open_clip's exceptions are not converted."""
    import open_clip

    model = open_clip.CustomTextCLIP(
        embed_dim=embed_dim, vision_cfg=dict(vision), text_cfg=dict(text), quick_gelu=quick_gelu
    )
    return model.visual, model.text


def default_pooler(model_type: str) -> str | None:
    """Return the pooling of an encoder of transformers for which a configuration states none; None if unknown."""
    from open_clip.hf_configs import arch_dict

    return cast(str | None, arch_dict.get(model_type, {}).get("pooler"))


def make_tokenizer(source: str, context_length: int, **options: Any) -> Any:
    """Create an ``HFTokenizer``: open_clip's text cleaning followed by a tokenizer of transformers."""
    from open_clip.tokenizer import HFTokenizer

    return HFTokenizer(source, context_length, **options, trust_remote_code=False)


def _import_registry() -> ModuleType:
    """Import the module of published weights, but not its package, which imports transformers and torchvision."""
    if "open_clip" in sys.modules:
        return importlib.import_module("open_clip.pretrained")
    package = ModuleType(f"{__name__}.registry")
    package.__path__ = [str(_find_package())]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.pretrained")


def published_tags(name: str) -> list[str]:
    """List the tags of an architecture's published weights."""
    return list(_import_registry().list_pretrained_tags_by_model(name))


def published_weights(name: str, tag: str) -> Mapping[str, Any]:
    """Return the registry entry of published weights, with their preprocessing; empty if there is none."""
    return cast(Mapping[str, Any], _import_registry().get_pretrained_cfg(name, tag))


def download_weights(published: Mapping[str, Any]) -> Path:
    """Return the file of published weights, downloaded if necessary."""
    import open_clip

    return Path(open_clip.download_pretrained(dict(published)))


def load_folder(folder: Path) -> "tuple[Any, Callable[[Any], Tensor], Callable[[list[str]], Tensor]]":
    """Load a folder as users of open_clip do: model, image transform for evaluation, tokenizer."""
    import open_clip

    source = f"local-dir:{folder}"
    model, _, transform = open_clip.create_model_and_transforms(source)
    return model, transform, open_clip.get_tokenizer(source)


def load_prompts(name: str) -> Sequence[str | Callable[[str], str]]:
    """Return a list of class names, such as IMAGENET_CLASSNAMES, or of templates (functions of the class name)."""
    import open_clip

    return cast(Sequence[str | Callable[[str], str]], getattr(open_clip, name))
