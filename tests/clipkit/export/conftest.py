"""Fixtures of the export tests."""

from pathlib import Path

import pytest

from tests.clipkit.exported_models import draw_images


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return draw_images(tmp_path_factory.mktemp("images"))
