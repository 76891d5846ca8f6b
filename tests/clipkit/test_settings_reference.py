"""Tests of the settings reference: every setting is explained, within 80 columns."""

import re
import tomllib

import pytest

from clipkit.config import (
    Config,
    describe_setting,
    get_valid_values,
    section_fields,
    settings_reference,
    to_toml,
)
from clipkit.errors import ConfigError

NAMED = re.compile(r"[a-z_.0-9]+ = ")


def test_settings_have_an_explanation_and_a_valid_default() -> None:
    for entries in section_fields().values():
        for entry in entries:
            text, within = describe_setting(entry), get_valid_values(entry)
            assert len(text.split()) >= 2 and text.endswith((".", "}.")), entry.name
            assert text[0].isupper() or text.startswith('"'), entry.name
            assert within is None or within.holds(entry.default), entry.name


def test_settings_reference_lists_defaults_within_80_columns() -> None:
    lines = settings_reference()
    assert max(map(len, lines)) <= 80
    defaults = tomllib.loads("\n".join(line for line in lines if NAMED.match(line)))
    assert defaults == tomllib.loads(to_toml(Config()))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("optim.beta", ["optim.beta1", "optim.beta2"]),
        ("lr", ["optim.lr", "optim.min_lr", "optim.image_lr_scale", "optim.text_lr_scale"]),
        ("crop", ["data.crop_scale", "data.crop_aspect"]),
        ("aspect ratio", ["model.image_tokens"]),
        (
            "lock.",
            [
                "lock.image",
                "lock.text",
                "lock.unfreeze_every",
                "lock.image_until",
                "lock.text_until",
                "lock.store",
                "lock.views",
            ],
        ),
    ],
)
def test_text_selects_settings(text: str, names: list[str]) -> None:
    lines = settings_reference(text)
    assert [line.partition(" = ")[0] for line in lines if NAMED.match(line)] == names


def test_unknown_setting_suggests_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"^--settings optim.lrr: .* did you mean 'optim.lr'\?$"):
        settings_reference("optim.lrr")
