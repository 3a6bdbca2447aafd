"""Models in a folder, `MODEL/VERSION/FILE` with `MODEL/config.toml`, and what makes classes of their files."""
