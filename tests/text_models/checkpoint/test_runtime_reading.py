"""Models that torch alone serves, and what of them is refused before torch is loaded."""

import json
from pathlib import Path

import pytest
from tests.text_models import tiny

from weir.errors import SettingsError
from weir.text_models.checkpoint.reading import read_for


def test_a_model_with_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    sizes = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 32, "num_layers": 2, "num_heads": 4}
    (directory / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(SettingsError, match="is_encoder_decoder=True: must be false: t5 has a decoder"):
        read_for("torch", directory)
    with pytest.raises(
        SettingsError,
        match=r"model_type='t5': .* others are served from an ONNX file that the model has, or with --runtime torch",
    ):
        read_for("onnx", directory)
