"""Tests of ``redact_secrets``, which removes secrets from a configuration."""

import tomllib

from clipkit.config import Config, DataConfig, to_toml
from clipkit.files.terminal import redact_secrets


def test_configuration_without_secrets_is_valid_toml() -> None:
    sources = (
        "https://u:Zq@host/a/{00000..00003}.tar?sig=Zq",
        "pipe:curl -H 'Auth: \"Zq\"' https://host/0.tar",
        "/data/pairs\\x",
        "s3://bucket/é/0.tar",
    )
    config = Config(
        data=DataConfig(train=sources, filters=("width >= 256",), caption_prefix='say "a\\b"'), out="runs/x"
    )
    text = redact_secrets(to_toml(config))
    assert "Zq" not in text
    data = tomllib.loads(text)["data"]
    assert data["train"][0] == "https://host/a/{00000..00003}.tar"
    assert data["train"][2:] == list(sources[2:])
    before = tomllib.loads(to_toml(config))["data"]
    assert {key: value for key, value in data.items() if key != "train"} == {
        key: value for key, value in before.items() if key != "train"
    }
    assert data["caption_prefix"] == 'say "a\\b"'
