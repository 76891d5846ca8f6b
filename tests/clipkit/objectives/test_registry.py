"""Tests of objectives and terms registered from outside the package: their sections of the configuration."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from clipkit.cli import setting
from clipkit.config import Config, above, load_config, settings_reference, to_toml
from clipkit.errors import ConfigError
from clipkit.objectives import OBJECTIVES, TERMS, Objective, Term, select_objective, select_terms
from clipkit.objectives.base import after_setting, weight_setting


@dataclass(frozen=True, kw_only=True)
class Margin(Objective):
    """A toy."""

    section = "margin."
    summary = "a toy"
    margin: float = setting(0.2, "Difference of cosines.", above(0))


@dataclass(frozen=True, kw_only=True)
class Noise(Term):
    """Another toy."""

    section = "noise."
    stream = 9
    weight: float = weight_setting()
    width: int = setting(3, "Width.", needs="weight")
    after: int = after_setting()


@pytest.fixture(autouse=True, scope="module")
def registered() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OBJECTIVES, "margin", Margin)
        patch.setitem(TERMS, "noise", Noise)
        yield


def load(settings: Sequence[str]) -> Config:
    return load_config(Path(os.devnull), settings)


@given(margin=st.floats(1e-6, 1e6), weight=st.floats(1e-6, 1e6), width=st.integers(0, 99))
def test_declared_settings_are_parsed_selected_and_stored(margin: float, weight: float, width: int) -> None:
    config = load(
        ["loss.name=margin", f"margin.margin={margin}", f"noise.weight={weight}", f"noise.width={width}"]
    )
    assert select_objective(config) == Margin(margin=margin)
    assert select_terms(config) == {"noise": Noise(weight=weight, width=width)} == config.terms
    assert config.objectives["noise"].width == width and config.objectives["margin"].margin == margin
    settings = to_toml(config, differing_from=Config())
    assert f"[margin]\nmargin = {margin}" in settings or margin == 0.2
    assert load([]) != config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.name=margin", "margin.margin=0"], "margin.margin = 0.0 is invalid: expected above 0"),
        (["margin.margin=0.3"], "margin.margin = 0.3 has no effect unless loss.name=margin is set"),
        (["margin.margn=0.3"], "margin.margn is unknown: did you mean 'margin.margin'?"),
        (["noise.width=4"], "noise.width = 4 has no effect unless noise.weight is set"),
        (["noise.after=4"], "noise.after = 4 has no effect unless noise.weight is set"),
    ],
)
def test_declared_settings_are_checked(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings)
    assert str(caught.value) == message


def test_declared_settings_are_listed_after_the_loss() -> None:
    lines = settings_reference()
    headings = [line.partition("]")[0].removeprefix("[") for line in lines if line.startswith("[")]
    assert headings[headings.index("loss") :][:8] == [
        "loss", "global_clip", "margin", "caption", "masked", "image_gpt", "views", "words",
    ]  # fmt: skip
    assert settings_reference("margin.margin") == [
        "[margin] A toy.",
        "",
        "margin.margin = 0.2",
        "    Difference of cosines. (above 0)",
    ]
