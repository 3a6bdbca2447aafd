"""Writes a random CLIP with the sizes of ViT-B/32 into the folder `PLACE`, as transformers and as sentence-transformers save one.

A random model takes as long as a trained one. Its words are the bytes: the texts are of no interest here.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

WORDS = 49408  # of CLIP's own vocabulary: the size of the weights


def _letters() -> list[str]:
    """Return the characters that stand for the 256 bytes in CLIP's vocabulary, as GPT-2's does."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def write(place: Path) -> None:
    """Write the checkpoint."""
    torch.manual_seed(0)
    letters = _letters()
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    config = CLIPConfig()
    config.text_config.vocab_size = WORDS
    config.text_config.bos_token_id, config.text_config.eos_token_id = len(words) - 2, len(words) - 1
    CLIPModel(config).save_pretrained(place)
    CLIPImageProcessor().save_pretrained(place)
    (place / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (place / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(place / "vocab.json"), str(place / "merges.txt")).save_pretrained(place)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print("{}")
