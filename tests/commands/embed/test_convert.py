"""`weir embed convert`."""

from pathlib import Path

from tests.served import weir_here
from tests.text_server.bert_as_service import bundles


def test_a_checkpoint_becomes_a_directory_that_can_be_served(tmp_path: Path) -> None:
    original, made = tmp_path / "original", tmp_path / "made"
    bundles.write_original(original, labels=0)
    flags = ("-ckpt_name", "bert_model.ckpt", "-cased_tokenization")
    done = weir_here("embed", "convert", original, made, *flags)
    assert (done.returncode, done.stdout) == (0, f"wrote {made}: weir embed serve {made}\n"), done.stderr
    assert (made / "model.safetensors").is_file()


def test_what_cannot_be_converted_takes_one_line(tmp_path: Path) -> None:
    done = weir_here("embed", "convert", tmp_path, tmp_path / "made")
    assert done.returncode == 2 and done.stderr.startswith(f"weir: {tmp_path}") and done.stderr.count("\n") == 1
