"""Tests of the recipes of configs/domain: the commands of each comment, on data in the published layout."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import webdataset

import clipkit
from bench.parity import build_reference
from clipkit.model.architectures import get_architecture
from clipkit.model.names import to_open_clip
from tests.clipkit.format_images import bands_of
from tests.configs.recipes import (
    DOMAIN,
    SMALL,
    Made,
    classes,
    csv,
    picture,
    run_command,
    run_recipe,
    small_bert,
    small_clip,
)
from tests.forked import Forked

pytestmark = pytest.mark.slow
RETRIEVAL = [("retrieval", name) for name in ("mean_recall", "image_to_text_R@1", "text_to_image_R@10")]


def write_karpathy(folder: Path, name: str, splits: dict[str, int]) -> None:
    """Write images and the JSON of RSICD, RSITMD and UCM-captions, with five captions for each image."""
    images: list[dict[str, object]] = []
    for split, count in splits.items():
        for _ in range(count):
            number = len(images)
            picture(folder / "images" / f"{name}_{number}.tif", number)
            words = ("many", "some", "green", "large", "old")
            raw = [f"{word} buildings are near river {number}." for word in words]
            sentences = [{"tokens": text.split(), "raw": text, "imgid": number} for text in raw]
            images.append(
                {"filename": f"{name}_{number}.tif", "imgid": number, "sentences": sentences, "split": split}
            )
    (folder / f"dataset_{name}.json").write_text(json.dumps({"images": images, "dataset": name}))


def test_remoteclip(forked: Forked, tmp_path: Path) -> None:
    write_karpathy(tmp_path / "RSITMD", "rsitmd", {"train": 4, "val": 2, "test": 12})
    overrides = small_clip(tmp_path / "openai", "ViT-B-32-quickgelu", "model.image_size=64")
    made = Made(overrides=(*overrides, "batch_size=16"), scores=RETRIEVAL)
    metrics = run_recipe("remoteclip_vit_b_32", made, tmp_path, forked)
    assert metrics[-1]["epoch"] == 1  # 20 pairs of 4 images


def test_plip(forked: Forked, tmp_path: Path) -> None:
    rows = [
        (f"img/{picture(tmp_path / 'openpath/img' / f'{i}.jpg', i).name}", f"Melanoma number {i}.")
        for i in range(16)
    ]
    csv(tmp_path / "openpath/train.csv", ["image", "caption"], rows)
    names = ["ADI", "BACK", "DEB", "LYM", "MUC", "MUS", "NORM", "STR", "TUM"]
    classes(tmp_path / "Kather/train", names, 4)
    classes(tmp_path / "Kather/test", names, 6)
    tested = [(i, f"../Kather/test/{names[i % 9]}/{i // 9}.png", names[i % 9]) for i in range(54)]
    csv(tmp_path / "Kather_csv/Kather_test.csv", ["", "image", "label"], tested)
    made = Made(
        overrides=(*small_clip(tmp_path / "openai", "ViT-B-32-quickgelu"), "batch_size=8"),
        scores=[
            ("retrieval", "text_to_image_P@10"), ("retrieval", "text_to_image_P@50"),
            ("zero-shot", "f1_weighted"), ("zero-shot", "matthews_correlation"),
            ("linear-probe", "f1_weighted"), ("linear-probe", "matthews_correlation"),
        ],
    )  # fmt: skip
    run_recipe("plip", made, tmp_path, forked)


def test_quiltnet(forked: Forked, tmp_path: Path) -> None:
    columns = [
        "",
        "caption",
        "image_path",
        "subset",
        "split",
        "pathology",
        "magnification",
        "height",
        "width",
    ]
    rows = []
    for i in range(36):
        name = picture(tmp_path / "quilt" / f"video_image_{i // 2}.jpg", i // 2).name
        rows.append(
            (
                i,
                f"Text {i}, of the dermis",
                name,
                "quilt",
                "train" if i < 12 else "val",
                "['Skin']",
                1,
                32,
                40,
            )
        )
    csv(tmp_path / "quilt/quilt_1M_lookup.csv", columns, rows)
    for split in ("train", "test"):
        classes(tmp_path / "NCT-CRC" / split, ["ADI", "BACK", "DEB"], 6)
    made = Made(
        overrides=(*small_clip(tmp_path / "openai", "ViT-B-32-quickgelu"), "batch_size=12"),
        scores=[("zero-shot", "acc1"), ("linear-probe", "acc1"), ("retrieval", "text_to_image_R@10")],
        fine=["12 samples"],  # 12 texts of 6 images
    )
    run_recipe("quiltnet_vit_b_32", made, tmp_path, forked)


DERM = ("filename", "label", "truncated_caption", "caption", "source")


def write_derm(folder: Path) -> None:
    """Write Derm1M's tables, and a set of images by class."""
    for name, count in (("pretrain", 16), ("validation", 12)):
        rows = []
        for i in range(count):
            file = picture(folder / f"Derm1M/images/{name}_{i // 2}.png", i // 2).name
            rows.append((f"images/{file}", "nevus", f"a photo of skin lesion {i}", f"longer {i}", "youtube"))
        csv(folder / f"Derm1M/Derm1M_v2_{name}.csv", DERM, rows)
    for split in ("train", "test"):
        classes(folder / "PAD" / split, ["nevus", "melanoma"], 6)


def test_dermlip(forked: Forked, tmp_path: Path) -> None:
    write_derm(tmp_path)
    overrides = small_clip(tmp_path / "openai", "ViT-B-16-quickgelu")
    scores = [("zero-shot", "acc1"), ("linear-probe", "acc1"), ("retrieval", "image_to_text_R@10")]
    run_recipe(
        "dermlip_vit_b_16", Made(overrides=(*overrides, "batch_size=8"), scores=scores), tmp_path, forked
    )


def test_dermlip_with_pubmedbert(forked: Forked, tmp_path: Path) -> None:
    write_derm(tmp_path)
    text = small_bert(tmp_path / "pubmedbert")
    overrides = without_text(small_clip(tmp_path / "openai", "ViT-B-16-quickgelu"))
    made = Made(
        overrides=(*overrides, f"model.text={text}", "batch_size=8"),
        scores=[("zero-shot", "acc1"), ("retrieval", "image_to_text_R@10")],
    )
    run_recipe("dermlip_pubmedbert", made, tmp_path, forked)
    model = clipkit.load(tmp_path / "runs/dermlip_pubmedbert")
    assert model.architecture.text.context_length == 256


def without_text(settings: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the sizes of clipkit's text tower, for another one."""
    return tuple(setting for setting in settings if not setting.startswith("shape.text"))


def test_skyclip(forked: Forked, tmp_path: Path) -> None:
    for name, count in (("train_top30pct", 16), ("test_30K", 8)):
        rows = []
        for i in range(count):
            file = picture(tmp_path / f"SkyScript/images2/{name}{i}_CH_19.jpg", i, size=(64, 48))
            rows.append(
                (f"images2/{file.name}", f"residential area number {i}", f"area {i}, surrounded by forest")
            )
        csv(
            tmp_path / f"SkyScript/SkyScript_{name}_filtered_by_CLIP_openai.csv",
            ["filepath", "title", "title_multi_objects"],
            rows,
        )
    classes(tmp_path / "aid", ["Airport", "BareLand", "Beach"], 4)
    overrides = small_clip(tmp_path / "openai", "ViT-L-14-quickgelu")
    scores = [("zero-shot", "acc1"), ("retrieval", "text_to_image_R@1")]
    run_recipe(
        "skyclip_vit_l_14", Made(overrides=(*overrides, "batch_size=8"), scores=scores), tmp_path, forked
    )


def test_biomedclip(forked: Forked, tmp_path: Path) -> None:
    for split, count in (("train", 16), ("test", 201)):
        lines = []
        for i in range(count):
            file = picture(tmp_path / f"pmc15m/figures/PMC{split}{i}_f1.jpg", i).name
            caption = f"Figure {i}. A photo of the heart and lung, image {i}."
            lines.append({"image": f"figures/{file}", "caption": caption, "pmid": str(i), "pmcid": f"PMC{i}"})
        (tmp_path / f"pmc15m/{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    classes(tmp_path / "LC25000-lung", ["lung_aca", "lung_n", "lung_scc"], 4)
    weights = tmp_path / "imagenet.safetensors"
    safetensors.torch.save_file(timm.create_model("test_vit", num_classes=1000).state_dict(), weights)
    made = Made(
        overrides=(
            "model.name=ViT-Ti-8-48", "shape.embed=32", "model.image=timm:test_vit", "model.image_size=32",
            f"model.image_weights={weights}",
            f"model.text={small_bert(tmp_path / 'pubmedbert')}", "data.groups=1", "batch_size=8",
        ),
        scores=[("retrieval", "image_to_text_R@200"), ("retrieval", "text_to_image_R@10"), ("zero-shot", "acc1")],
    )  # fmt: skip
    run_recipe("biomedclip", made, tmp_path, forked)
    model = clipkit.load(tmp_path / "runs/biomedclip")
    assert model.preprocess.mean[0] == 0.48145466 and model.architecture.text.context_length == 256


def write_tar(path: Path, samples: Sequence[Mapping[str, str | bytes]]) -> None:
    """Write a WebDataset tar; a sample's members by their names without the key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number, members in enumerate(samples):
            encoded = {
                name: data.encode() if isinstance(data, str) else data for name, data in members.items()
            }
            tar.write({"__key__": f"{path.stem}_{number:06d}", **encoded})


def test_georsclip(forked: Forked, tmp_path: Path) -> None:
    for source in ("pub11", "rs3"):
        for shard in range(2):
            samples: list[dict[str, str | bytes]] = []
            for i in range(8):
                image = picture(tmp_path / "made.jpg", 10 * shard + i).read_bytes()
                name = f"{source}_{i}.jpg"
                samples.append(
                    {"img_content": image, "img_name": name, "caption": f"satellite image {shard} {i}"}
                )
            write_tar(tmp_path / f"RS5M/train/{source}-train-{shard:04d}.tar", samples)
    classes(tmp_path / "AID", ["Airport", "BareLand", "Beach"], 4)
    write_karpathy(tmp_path / "RSITMD", "rsitmd", {"train": 2, "test": 12})
    sources = json.dumps([f"RS5M/train/{source}-train-{{0000..0001}}.tar" for source in ("pub11", "rs3")])
    overrides = small_clip(tmp_path / "openai", "ViT-B-32-quickgelu")
    made = Made(
        overrides=(*overrides, "batch_size=8", f"data.train={sources}"),
        scores=[*RETRIEVAL, ("zero-shot", "acc1")],
    )
    run_recipe("georsclip_vit_b_32", made, tmp_path, forked)
    size = sum(
        file.stat().st_size for file in (tmp_path / "runs/georsclip_vit_b_32").rglob("model.safetensors")
    )
    assert size < 2**20  # adapters only


SPECIES = [
    "Animalia Chordata Mammalia Carnivora Felidae Panthera tigris",
    "Animalia Chordata Mammalia Carnivora Felidae Panthera leo",
    "Animalia Chordata Aves Passeriformes Corvidae Corvus corax",
]


def test_bioclip(forked: Forked, tmp_path: Path) -> None:
    kinds = ("sci.txt", "com.txt", "taxon.txt", "sci_com.txt", "taxon_com.txt")
    more = (
        "scientific_name.txt",
        "common_name.txt",
        "taxonomic_name.txt",
        "taxonTag.txt",
        "taxonTag_com.txt",
    )
    for shard in range(2):
        samples: list[dict[str, str | bytes]] = []
        for i in range(12):
            image = picture(tmp_path / "made.jpg", 12 * shard + i).read_bytes()
            samples.append(
                {"jpg": image, **{kind: f"a photo of {kind[:5]} Animalia {i}." for kind in (*kinds, *more)}}
            )
        write_tar(tmp_path / f"TreeOfLife-10M/train/shard-{shard:06d}.tar", samples)
    for split in ("train", "test"):
        classes(tmp_path / "rare_species" / split, SPECIES, 6)
    overrides = small_clip(tmp_path / "openai", "ViT-B-16-quickgelu")
    pattern = "data.train=TreeOfLife-10M/train/shard-{000000..000001}.tar"
    made = Made(
        overrides=(*overrides, "batch_size=8", "data.groups=1", pattern),
        scores=[("zero-shot", "acc1"), ("zero-shot", "acc1_genus"), ("few-shot", "acc1")],
    )
    run_recipe("bioclip", made, tmp_path, forked)


def test_ms_clip(forked: Forked, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = []
    for i in range(16):
        values = random.integers(0, 10000, (10, 24, 24)).astype(np.uint16)
        (tmp_path / "ssl4eo").mkdir(exist_ok=True)
        np.save(tmp_path / f"ssl4eo/{i}.npy", values)
        rows.append((f"{i}.npy", f"The image is a satellite view number {i}."))
    csv(tmp_path / "ssl4eo/train.csv", ["file", "caption"], rows)
    for label, name in enumerate(("Forest", "River")):
        (tmp_path / "EuroSAT_MS" / name).mkdir(parents=True)
        for i in range(6):
            values = random.integers(0, 3000 * (label + 1), (24, 24, 10)).astype(np.uint16)
            (tmp_path / f"EuroSAT_MS/{name}/{i}.tif").write_bytes(bands_of(values))
    rows = [(f"../EuroSAT_MS/{name}/{i}.tif", name) for name in ("Forest", "River") for i in range(6)]
    csv(tmp_path / "EuroSAT_MS_csv/test.csv", ["Filename", "ClassName"], rows)
    overrides = small_clip(tmp_path / "laion", "ViT-B-16")
    scores = [("zero-shot", "acc1"), ("retrieval", "text_to_image_MAP@100")]
    made = Made(overrides=(*overrides, "batch_size=8"), scores=scores)
    run_recipe("ms_clip", made, tmp_path, forked)
    assert clipkit.load(tmp_path / "runs/ms_clip").preprocess.channels == 10


UNIMED = {
    "radimagenet_webdataset": "_radimagenet_", "chexpert_webdataset": "_chexpert_", "openi_webdataset": "_openi_",
    "chest_xray8_webdataset": "_chestxray8_", "mimic_cxr": "_mimiccxr_", "roco_webdataset": "",
    "pmc_clip_webdataset": "", "llava_med_alignment_set_webdataset": "", "llava_med_hq_60k_set_webdataset": "",
    "quilt_webdataset": "_medicat_", "retina_part1_webdataset": "_all_retina_merged_",
    "retina_part2_webdataset": "_dr_", "retina_part3_webdataset": "_dr_",
}  # fmt: skip


def test_unimed_clip(forked: Forked, tmp_path: Path) -> None:
    for source, mark in UNIMED.items():
        samples: list[dict[str, str | bytes]] = []
        for i in range(3):
            image = picture(tmp_path / "made.png", i).read_bytes()  # PNGs that are called jpg, as published
            text = f"a photo of the lung {i}"
            if mark:
                text = "".join(f"{text}, text {j}.{mark}" for j in range(10))
            samples.append({"jpg": image, "txt": text + ("noreportpresent" if source == "mimic_cxr" else "")})
        write_tar(tmp_path / f"unimed/{source}/dataset-000001.tar", samples)
    classes(tmp_path / "BACH", ["Benign", "InSitu", "Invasive", "Normal"], 4)
    name = "ViT-Ti-8-48-quickgelu"
    theirs = build_reference(to_open_clip(get_architecture(name)), seed=0)
    torch.save(theirs.state_dict(), tmp_path / "b16_400m.pt")  # as published: nothing but tensors
    overrides = (f"model.name={name}", f"model.text={small_bert(tmp_path / 'biomedbert')}", "data.groups=1")
    made = Made(overrides=(*overrides, "batch_size=32"), scores=[("zero-shot", "acc1")])
    run_recipe("unimed_clip", made, tmp_path, forked)


def test_bioclip_2(forked: Forked, tmp_path: Path) -> None:
    kinds = ("sci.txt", "com.txt", "taxon.txt", "sci_com.txt", "taxon_com.txt")
    for folder, names in (("TreeOfLife-200M", kinds), ("laion2b", ("txt",))):
        samples: list[dict[str, str | bytes]] = []
        for i in range(16):
            image = picture(tmp_path / "made.jpg", i).read_bytes()
            samples.append({"jpg": image, **{name: f"{name[:3]} {folder} {i}" for name in names}})
        write_tar(tmp_path / folder / ("shard-00000.tar" if len(names) > 1 else "00000.tar"), samples)
    for split in ("train", "test"):
        classes(tmp_path / "rare_species" / split, SPECIES, 6)
    made = Made(
        overrides=(
            *small_clip(tmp_path / "laion", "ViT-L-14"), "batch_size=14", "data.groups=1",
            'data.train=["TreeOfLife-200M/shard-{00000..00000}.tar","laion2b/{00000..00000}.tar"]',
            "data.weights=[12,2]",
        ),
        scores=[("zero-shot", "acc1"), ("zero-shot", "acc1_family"), ("few-shot", "acc1")],
    )  # fmt: skip
    run_recipe("bioclip_2", made, tmp_path, forked)


def pretrained_vit(*, layer_scale: bool) -> dict[str, torch.Tensor]:
    """Return the weights of timm's ViT with one narrow block and patches of 16 pixels."""
    init = 0.1 if layer_scale else None
    tower = timm.models.VisionTransformer(
        img_size=224, patch_size=16, embed_dim=64, depth=1, num_heads=1, num_classes=0, init_values=init
    )
    return {name: value.clone() for name, value in tower.state_dict().items()}


def test_keep(forked: Forked, tmp_path: Path) -> None:
    groups = {}
    for number in range(6):
        paths = [tmp_path / f"keep/group{number}_{i}.jpg" for i in range(1 + number % 3)]
        images = [picture(path, 10 * number + i).name for i, path in enumerate(paths)]
        groups[f"openpath_group_{number:06d}"] = {
            "images": images,
            "merged_caption": [f"a photo of a melanoma {number}", f"shows the skin, nevus {number}"],
            "anatomy": "skin",
            "labels": {
                "DOID:8923": {"concept_syn": ["skin melanoma", "Melanoma"], "cancer_type": "melanoma"}
            },
        }
    (tmp_path / "keep/groups.json").write_text(json.dumps(groups))
    classes(tmp_path / "BACH", ["Benign", "InSitu", "Invasive", "Normal"], 4)
    torch.save(pretrained_vit(layer_scale=True), tmp_path / "uni.bin")
    made = Made(
        overrides=(
            *without_text(SMALL), f"model.text={small_bert(tmp_path / 'pubmedbert')}", "batch_size=8",
            "lock.image_until=1", "lock.text_until=1", "optim.min_lr=0",
        ),
        scores=[("zero-shot", "mean_per_class_recall"), ("zero-shot", "f1_weighted")],
        fine=["24 samples", "6 values, 0 capped, 6 repeated"],  # 12 pairs of 6 groups
    )  # fmt: skip
    run_recipe("keep", made, tmp_path, forked)


def test_conch(forked: Forked, tmp_path: Path) -> None:
    rows = []
    for i in range(16):
        name = picture(tmp_path / f"pathology/{i}.png", i).name
        rows.append((name, f"Invasive ductal carcinoma, grade {i}; the stroma is dense."))
    csv(tmp_path / "pathology/pairs.csv", ["image", "caption"], rows)
    classes(tmp_path / "SICAP", ["NC", "G3", "G4", "G5"], 4)
    weights = pretrained_vit(layer_scale=False)
    backbone = {f"module.backbone.{name}": value for name, value in weights.items()}
    head = {
        "module.head.mlp.0.weight": torch.zeros(8, 64),
        "module.backbone.masked_embed": torch.zeros(1, 64),
    }
    torch.save({"teacher": backbone | head, "epoch": 3}, tmp_path / "ibot.pth")
    made = Made(
        overrides=(*SMALL, "caption.layers=1", "caption.queries=4", "batch_size=8"),
        scores=[
            ("zero-shot", name) for name in ("cohen_kappa_quadratic", "roc_auc_one_vs_one", "f1_weighted")
        ],
    )
    metrics = run_recipe("conch", made, tmp_path, forked)
    assert metrics[-1]["loss_caption"] > 0


def test_gcl(forked: Forked, tmp_path: Path) -> None:
    columns = (
        "query", "product_id", "position", "title", "pair_id", "image_local", "score_linear", "score_reciprocal",
        "no_score", "query_id",
    )  # fmt: skip
    rows: list[Sequence[object]] = []
    for query in range(4):
        for position in range(1, 7):
            product = (3 * query + position) % 12
            name = f"images/{product}.jpg"
            picture(tmp_path / "marqo_gs_full_10m" / name, product)
            pair, title = f"{query}_{product}", f"Oxford shoe, number {product}"
            scores = (101 - position, 1 / position, 1)
            rows.append((f"red shoes {query}", product, position, title, pair, name, *scores, query))
    csv(tmp_path / "marqo_gs_full_10m/query_0_product_id_0.csv", columns, rows)
    made = Made(
        overrides=(*small_clip(tmp_path / "laion", "ViT-B-32"), "batch_size=12"),
        scores=[
            ("retrieval", f"text_to_image_{name}") for name in ("nDCG@10", "ERR", "RBP_0.9", "MRR", "P@10")
        ],
        fine=["24 samples"],
    )
    run_recipe("gcl_vit_b_32", made, tmp_path, forked)


def test_marqo_fashionsiglip(forked: Forked, tmp_path: Path) -> None:
    (tmp_path / "fashion").mkdir()
    lines = []
    for i in range(28):
        image = picture(tmp_path / f"fashion/{i}.jpg", i).name
        kinds = ("description", "title", "color", "material", "category", "details", "keywords")
        texts = {kind: f"{kind} of dress {i}" for kind in kinds}
        lines.append({"image": image, **texts, "split": "train" if i < 16 else "test"})
    (tmp_path / "fashion/products.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = Made(
        overrides=(*small_clip(tmp_path / "siglip", "ViT-B-16"), "batch_size=8"),
        scores=[("retrieval", "text_to_image_R@1"), ("retrieval", "text_to_image_R@10")],
    )
    run_recipe("marqo_fashionsiglip", made, tmp_path, forked)


def test_chexzero(forked: Forked, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    images = np.random.default_rng(0).integers(0, 256, (16, 320, 320)).astype(np.float32)
    with h5py.File(tmp_path / "data/cxr.h5", "w") as file:
        file.create_dataset("cxr", data=images)
    rows = [(f"s{50000000 + i}.txt", f"No acute cardiopulmonary process {i}.") for i in range(16)]
    csv(tmp_path / "data/mimic_impressions.csv", ["filename", "impression"], rows)
    findings = tomllib.loads((DOMAIN / "cards/chexpert.toml").read_text())["keys"]
    labels: list[Sequence[object]] = []
    for i in range(8):
        name = f"test/patient{i}/study1/view1_frontal.jpg"
        picture(tmp_path / "CheXpert" / name, i)
        labels.append((name, *((i + j) % 2 for j in range(14))))
    csv(tmp_path / "CheXpert/test_labels.csv", ["Path", *findings], labels)
    overrides = (*small_clip(tmp_path / "openai", "ViT-B-32-quickgelu"), "checkpoint.every_steps=1")
    made = Made(overrides=(*overrides, "batch_size=8"), scores=[("zero-shot", "roc_auc_macro")])
    run_recipe("chexzero", made, tmp_path, forked)
    models = [f"--model runs/chexzero/checkpoints/step_0000000{step}" for step in (1, 2)]
    run_command(f"python -m eval ensemble {' '.join(models)} --data CheXpert", made, tmp_path, forked)
    (line, *_) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["metric"] == "roc_auc_macro" and line["ensemble"].count("sha256:") == 2
