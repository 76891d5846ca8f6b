"""Published outputs of public models for given inputs, ``NAME.toml``, and what may explain other outputs."""
