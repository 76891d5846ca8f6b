"""Tests of the config files: each loads, states its cost correctly and fits the GPUs of its launch commands.

A file describes itself in its first comment, as ``# name: value``. ``clipkit.training.costs`` estimates
memory for as many ranks as the file states GPUs; no GPU is used.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from clipkit.config import Config, load_config as load_epochs
from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP
from clipkit.model.measure import image_flops
from clipkit.training.build import shape_of
from clipkit.training.costs import Estimate, estimate, workloads_of
from tests.forked import Ended, Forked

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
WITHOUT_LAUNCH = ("emoji", "emoji_27_languages", "finetune_heads", "quickstart")  # they run on a CPU
DESCRIBED = [path for path in CONFIGS if path.stem not in WITHOUT_LAUNCH]
DRY = [ROOT / "configs" / f"{name}.toml" for name in ("quickstart", "vit_b_32", "clipa_vit_b_16", "vit_h_14")]
FIELDS = ("data", "launch", "GPUs", "samples seen", "expected", "GPU-hours")
GPUS_OF_NODE = 8  # as in configs/launch/slurm.sh
FITS = 72 * 2**30  # of 80 GB; CUDA, NCCL and allocator fragmentation take the rest
SLURM = "configs/launch/slurm.sh"


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a configuration; of those whose steps depend on the data, with an epoch of 40 steps."""
    return load_epochs(path, overrides, count_epoch=lambda _: 40.0)


def name_of(path: Path) -> str:
    return path.stem


def header(path: Path) -> dict[str, list[str]]:
    """Parse the first comment of a file into values by name; join continuation lines."""
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if match := re.match(r"# ([A-Za-z][A-Za-z -]*): (.+)", line):
            values = found.setdefault(match[1], [])
            values.append(match[2])
        elif values and line.startswith("#   "):
            values[-1] = values[-1].removesuffix("\\").rstrip() + " " + line[4:]
        else:
            values = None
    return found


def gpus_of(path: Path) -> int:
    (text,) = header(path)["GPUs"]
    match = re.match(r"\d+", text)
    assert match is not None, text
    return int(match[0])


def cost(config: Config, world: int) -> Estimate:
    """Estimate the cost on ``world`` GPUs, as ``train.py --dry-run`` does."""
    shard_ranks, bf16 = min(world, GPUS_OF_NODE), config.precision != "fp32"
    return estimate(workloads_of(config, world=world, shard_ranks=shard_ranks, bf16=bf16)[-1])


def options(words: list[str]) -> dict[str, str]:
    """Parse the options ``--name value`` and ``--name=value`` of a command."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else following
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_config_is_valid(path: Path) -> None:
    config = load_config(path)
    if not config.model.text:  # another text tower is read from the hub
        shape_of(config.model, config.loss, config.small)  # also checks the settings of small.*
    assert config.small.steps < config.steps
    assert config.optim.warmup < config.steps
    assert config.out == f"runs/{path.stem}"


def test_small_image_size_must_be_a_multiple_of_the_patch_size() -> None:
    config = load_config(ROOT / "configs" / "quickstart.toml", ["small.steps=3", "small.image_size=10"])
    with pytest.raises(
        ConfigError, match="fit ViT-Ti-4-16: expected a multiple of its patch size, 4, and at most"
    ):
        shape_of(config.model, config.loss, config.small)


@pytest.mark.parametrize(
    ("tower", "message"),
    [
        ("resnet10t", ""),
        ("bat_resnext26ts", "timm rejects bat_resnext26ts at 40 pixels"),
        ("vit_tiny_patch16_224", "it requires an image tower that encodes other sizes"),
    ],
)
def test_small_images_of_timm_towers(tower: str, message: str) -> None:
    settings = [f"model.image=timm:{tower}", "model.image_size=64", "small.steps=3", "small.image_size=40"]
    config = load_config(ROOT / "configs" / "quickstart.toml", settings)
    if message:
        with pytest.raises(ConfigError, match=message):
            shape_of(config.model, config.loss, config.small)
        return
    shape = shape_of(config.model, config.loss, config.small)
    model = CLIP(shape)
    assert model.encode_image(torch.zeros(2, 3, 40, 40, dtype=torch.uint8)).shape == (2, shape.embed_dim)
    whole, small = (image_flops(model, image_size=size).both for size in (0, 40))
    assert 0.35 < small / whole < 0.55  # odd sizes are rounded up


@pytest.mark.parametrize("path", DESCRIBED, ids=name_of)
def test_header_has_all_fields(path: Path) -> None:
    stated = header(path)
    assert set(FIELDS) <= set(stated), f"{path.name} lacks {set(FIELDS) - set(stated)}"
    (expected,) = stated["expected"]
    if "%" in expected:  # a published score of another implementation
        assert "published" in expected, expected
        assert "not measured here" in expected or "not known for this run" in expected, expected
    else:
        assert expected.startswith("not known"), expected


@pytest.mark.parametrize("path", DESCRIBED, ids=name_of)
def test_samples_seen_equal_steps_times_batch_size(path: Path) -> None:
    config = load_config(path)
    (text,) = header(path)["samples seen"]
    match = re.match(r"([\d_]+) = ([\d_]+) steps × ([\d_]+)", text)
    assert match is not None, text
    seen, steps, batch = map(int, match.groups())
    assert (steps, batch) == (config.steps, config.batch_size)
    assert seen == steps * batch


@pytest.mark.parametrize("path", DESCRIBED, ids=name_of)
def test_launch_commands_use_the_stated_number_of_gpus(path: Path) -> None:
    kinds = set()
    for line in header(path)["launch"]:
        words = shlex.split(line)
        given = options(words)
        kinds.add(words[0])
        if words[0] == "sbatch":
            assert words[-1] == SLURM and (ROOT / SLURM).is_file()
            exported = dict(one.split("=", 1) for one in given["--export"].split(",")[1:])
            assert exported["CONFIG"] == f"configs/{path.name}"
            assert given["--job-name"] == path.stem  # the script derives the run folder from it
            overrides = [f"data.train={exported['DATA']}", *exported.get("SETTINGS", "").split()]
            gpus = int(given["--nodes"]) * int(given.get("--gpus-per-node", GPUS_OF_NODE))
        else:
            assert words[0] in ("torchrun", "python"), line
            at = words.index("train.py")
            assert words[at + 1] == f"configs/{path.name}"
            overrides = words[at + 2 :]
            gpus = int(given.get("--nnodes", 1)) * int(given.get("--nproc-per-node", 1))
        assert gpus == gpus_of(path), line
        load_config(path, overrides)
    assert kinds >= {"sbatch"} and len(kinds) == 2, f"{path.name}: one line for SLURM, one without"


@pytest.mark.parametrize("path", DESCRIBED, ids=name_of)
def test_each_of_several_nodes_reads_its_part_of_the_shards(path: Path) -> None:
    nodes = gpus_of(path) // GPUS_OF_NODE
    if nodes > 1:
        assert load_config(path).data.groups % nodes == 0


def test_slurm_script_requests_gpus_per_node() -> None:
    text = (ROOT / SLURM).read_text(encoding="utf-8")
    assert re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", text, re.MULTILINE) == [str(GPUS_OF_NODE)]


@pytest.mark.parametrize("path", DESCRIBED, ids=name_of)
def test_memory_fits_80_gb_gpus(path: Path) -> None:
    memory = cost(load_config(path), gpus_of(path)).memory
    assert memory.activations is not None
    assert memory.total <= FITS, f"{path.name} takes {memory.total / 2**30:.1f} GiB of each GPU"


@pytest.fixture(scope="module")
def dry_runs(forked: Forked) -> dict[Path, Ended]:
    """Run ``--dry-run`` on one config of each kind, two at a time, for the GPUs that the file states."""

    def dry_run(path: Path) -> Ended:
        gpus = ["--gpu", "H100", "--gpus", str(gpus_of(path))] if path in DESCRIBED else []
        return forked.run("train.py", [str(path), "--dry-run", *gpus], {})

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(DRY, pool.map(dry_run, DRY), strict=True))


@pytest.mark.parametrize("path", DRY, ids=name_of)
def test_dry_run_prints_costs(path: Path, dry_runs: dict[Path, Ended]) -> None:
    done = dry_runs[path]
    assert done.returncode == 0, done.stderr
    settings, _, costs = done.stdout.partition("\nparameters ")
    assert tomllib.loads(settings)["steps"] == load_config(path).steps
    whole = sum(cost(load_config(path), 1).parameters.values())
    assert f"{whole / 1e6:,.1f} M in all" in costs
    assert re.search(r"\nmemory( per GPU)? +[\d.]+ GiB weights", costs)


def rows() -> Iterator[list[str]]:
    """Yield the cells of each row of the table in configs/README.md, without its header."""
    for line in (ROOT / "configs" / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ["):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_readme_table_lists_all_configs() -> None:
    table = {cells[0]: cells for cells in rows()}
    assert sorted(table) == sorted(f"[`{path.name}`]({path.name})" for path in CONFIGS)
    for path in CONFIGS:
        cells, config = table[f"[`{path.name}`]({path.name})"], load_config(path)
        assert cells[2] == f"{config.steps * config.batch_size:,}", path.name
        if path in DESCRIBED:
            assert cells[3] == str(gpus_of(path)), path.name
            scores, (expected,) = re.findall(r"[\d.]+%", cells[4]), header(path)["expected"]
            assert all(score in expected for score in scores), f"{path.name}: {scores}"
