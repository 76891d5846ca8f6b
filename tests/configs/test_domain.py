"""Tests of the files of configs/domain: comments, published shapes, memory, and the README's tables."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import BertConfig

from clipkit.config import load_config
from clipkit.training.build import select_shape
from clipkit.training.costs import Machine, cost_table, run_costs, workloads_of
from tests.configs.recipes import DOMAIN, small_bert
from tests.forked import ROOT, Forked
from tests.test_configs import FITS, GPUS_OF_NODE, gpus_of, header, options

RECIPES = sorted(DOMAIN.glob("*.toml"))
# one with clipkit's towers, one with an encoder of transformers and a tower of timm
DRY = ("plip", "biomedclip")
FIELDS = {"source", "data", "launch", "evaluate", "GPUs", "samples seen", "expected", "GPU-hours", "differs"}
# images, image size, captions: as published
SHAPES = {
    "biomedclip": ("TimmVision", 224, 256),
    "bioclip": ("VisionTower", 224, 77),
    "bioclip_2": ("VisionTower", 224, 77),
    "chexzero": ("VisionTower", 224, 77),
    "conch": ("VisionTower", 448, 128),
    "dermlip_pubmedbert": ("VisionTower", 224, 256),
    "dermlip_vit_b_16": ("VisionTower", 224, 77),
    "gcl_vit_b_32": ("VisionTower", 224, 77),
    "georsclip_vit_b_32": ("VisionTower", 224, 77),
    "keep": ("VisionTower", 224, 256),
    "marqo_fashionsiglip": ("OpenClipVision", 224, 64),
    "ms_clip": ("VisionTower", 224, 77),
    "plip": ("VisionTower", 224, 77),
    "quiltnet_vit_b_32": ("VisionTower", 224, 77),
    "remoteclip_vit_b_32": ("VisionTower", 224, 77),
    "skyclip_vit_l_14": ("VisionTower", 224, 77),
    "unimed_clip": ("VisionTower", 224, 256),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    """Return the settings that replace encoders of the hub by a folder with BERT's published sizes."""
    folder = tmp_path_factory.mktemp("hub") / "bert"
    small_bert(folder)
    BertConfig().save_pretrained(folder)  # bert-base, as PubMedBERT and BiomedBERT

    def settings(path: Path) -> list[str]:
        model = load_config(path).model
        if model.tokenizer:
            return ["model.tokenizer="]  # trained on the data; CLIP's has more tokens
        return [f"model.text=transformers:{folder}"] if model.text.startswith("transformers:") else []

    return settings


def name_of(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_comment_has_all_fields_and_its_numbers_are_right(path: Path) -> None:
    fields = header(path)
    assert set(fields) >= FIELDS, FIELDS - set(fields)
    config = load_config(path)
    match = re.match(r"([\d_]+) = ([\d_]+) steps × ([\d_]+): .*epoch", fields["samples seen"][0])
    assert match is not None, fields["samples seen"]
    seen, steps, batch = map(int, match.groups())
    assert (seen, steps, batch) == (config.steps * config.batch_size, config.steps, config.batch_size)
    (expected,) = fields["expected"]
    if re.search(r"\d%|mAP", expected) and not expected.startswith("not known"):
        assert "published" in expected and "not measured here" in expected, expected
    assert config.optim.warmup < config.steps and config.out == f"runs/{path.stem}"
    assert any("https://" in text for text in fields["source"])


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_commands_of_the_comment_are_of_this_file(path: Path) -> None:
    fields = header(path)
    (launch,) = fields["launch"]
    words = shlex.split(launch)
    at = words.index("train.py")
    assert words[at + 1] == str(path.relative_to(ROOT))
    load_config(path, words[at + 2 :])
    given = options(words)
    gpus = int(given.get("--nnodes", 1)) * int(given.get("--nproc-per-node", 1))
    assert gpus == gpus_of(path)
    nodes = int(given.get("--nnodes", 1))
    assert load_config(path).data.groups % nodes == 0
    assert any(f"--model runs/{path.stem}" in line for line in fields["evaluate"])
    for line in (*fields["evaluate"], *fields.get("pack", ())):
        words = shlex.split(line)
        assert words[0] == "cp" or words[:2] in (["python", "-m"], ["python", "-c"]), line
        assert words[0] != "cp" or (ROOT / words[1]).is_file(), line


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_shapes_are_those_published_and_fit_80_gb(path: Path, published: Callable[[Path], list[str]]) -> None:
    config = load_config(path, published(path))
    shape = select_shape(config)
    found = (type(shape.vision).__name__, shape.vision.image_size, shape.text.context_length)
    assert found == SHAPES[path.stem]
    works = workloads_of(config, world=gpus_of(path), shard_ranks=min(gpus_of(path), GPUS_OF_NODE), bf16=True)
    costs = run_costs(works, Machine(gpu="H100", memory=80 << 30, peak=989e12, measured=False))
    memory = costs.estimate.memory
    assert memory.total <= FITS, f"{memory.total / 2**30:.1f} GiB"
    table = "\n".join(cost_table(costs))
    assert re.search(r"\nmemory( per GPU)? +[\d.]+ GiB weights", table), table


@pytest.mark.parametrize("path", [DOMAIN / f"{name}.toml" for name in DRY], ids=name_of)
def test_dry_run(path: Path, forked: Forked, published: Callable[[Path], list[str]]) -> None:
    arguments = [str(path), "--dry-run", "--gpu", "H100", "--gpus", str(gpus_of(path)), *published(path)]
    ended = forked.run("train.py", arguments, {})
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\nmemory( per GPU)? +[\d.]+ GiB weights", ended.stdout), ended.stdout


def test_readme_lists_all_recipes_and_cards() -> None:
    text = (DOMAIN / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/]+\.toml)\)", text))
    files = {str(path.relative_to(DOMAIN)) for path in DOMAIN.rglob("*.toml")}
    assert linked == files
