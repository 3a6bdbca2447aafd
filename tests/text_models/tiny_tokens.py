"""Small vocabularies of each kind, made of the words of a few sentences: WordPiece, byte-level BPE, Unigram."""

import json
import math
import string
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = """
First do it, then do it right, then do it better. A weir holds the water back until there is enough of it, and lets it go at once.
The quick brown fox jumps over the lazy dog while the small clients wait for the large ones in the line.
Return the mean of the values of each batch, raise an error that names the thing and the rule, and read no file twice.
It is raining in the mountains; the river rises and the mill turns faster than yesterday. Who reads this has time.
""".strip().lower()

SQUARE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ANGLE = ["<s>", "<pad>", "</s>", "<unk>"]


def write(directory: Path, family: str) -> int:
    """Write the tokenizer of a family and return how many tokens it knows."""
    made, settings = made_for(family)
    made.save(str(directory / "tokenizer.json"))
    settings |= {"model_max_length": 64, "tokenizer_class": CLASSES[family]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(made.get_vocab_size())


def write_vocabulary(directory: Path, *, cased: bool = False) -> int:
    """Write a vocab.txt alone, as BERT has it, and return how many tokens it knows."""
    tokens = pieces(SQUARE)
    if cased:
        tokens += ["The", "First", *string.ascii_uppercase, *("##" + letter for letter in string.ascii_uppercase)]
    (directory / "vocab.txt").write_text("".join(token + "\n" for token in tokens))
    return len(tokens)


def write_merges(directory: Path) -> int:
    """Write a vocab.json and a merges.txt alone, as RoBERTa has them, and return how many tokens it knows."""
    made, _ = made_for("roberta")
    made.model.save(str(directory))
    return int(made.get_vocab_size())


def vocabulary_size() -> int:
    """Return how many tokens the vocab.txt of an uncased BERT has."""
    return len(pieces(SQUARE))


def size(family: str) -> int:
    """Return how many tokens a family's tokenizer knows."""
    return int(made_for(family)[0].get_vocab_size())


CLASSES = {
    "bert": "BertTokenizer", "distilbert": "DistilBertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer",
    "mpnet": "MPNetTokenizer", "clip": "CLIPTokenizer", "siglip": "SiglipTokenizer",
}  # fmt: skip


def made_for(family: str) -> tuple[Any, dict[str, Any]]:
    """Return a family's tokenizer and its tokenizer_config.json."""
    if family in ("bert", "distilbert"):
        return _wordpiece(SQUARE, "[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]")
    if family == "mpnet":
        return _wordpiece([*ANGLE, "[UNK]", "<mask>"], "<s>", "</s>", "[UNK]", "<pad>", "<mask>")
    if family == "clip":
        return _words_of_bytes()
    if family == "siglip":
        return _without_beginning(_unigram()[0])
    return _bytes() if family == "roberta" else _unigram()


def pieces(special: list[str]) -> list[str]:
    """Return a WordPiece vocabulary: the frequent words, and every letter, digit and sign, first in a word and within."""
    words = Counter(word.strip(string.punctuation) for word in CORPUS.split())
    single = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    known = [
        *special,
        *single,
        *("##" + one for one in single if one.isalnum()),
        "##ing",
        "##er",
        "##s",
        "é",
        "水",
        "и",
    ]
    return list(dict.fromkeys([*known, *(word for word, _ in words.most_common(90))]))


def _wordpiece(special: list[str], cls: str, sep: str, unk: str, pad: str, mask: str) -> tuple[Any, dict[str, Any]]:
    tokens = pieces(special)
    places = {token: place for place, token in enumerate(tokens)}
    made = Tokenizer(models.WordPiece(places, unk_token=unk, max_input_chars_per_word=100))
    flags: dict[str, Any] = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    made.normalizer = normalizers.BertNormalizer(**flags)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return _finished(made, cls, sep, unk, pad, mask, {"do_lower_case": True})


def _bytes() -> tuple[Any, dict[str, Any]]:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sizes: dict[str, Any] = {"vocab_size": 420, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(CORPUS.split("\n"), trainers.BpeTrainer(special_tokens=[*ANGLE, "<mask>"], **sizes))
    return _finished(made, "<s>", "</s>", "<unk>", "<pad>", "<mask>", {"add_prefix_space": False})


def _unigram() -> tuple[Any, dict[str, Any]]:
    words = Counter("▁" + word for word in CORPUS.replace(",", " ,").replace(".", " .").split())
    parts = Counter(word[start : start + size] for word in words for size in (2, 3) for start in range(len(word)))
    total = words.total()
    scored = [(token, 0.0) for token in ANGLE]
    scored += [(word, math.log(count / total)) for word, count in words.most_common(90)]
    scored += [(part, -7.0) for part, _ in parts.most_common(60) if part not in words]
    scored += [(one, -9.0) for one in ["▁", *string.ascii_letters, *string.digits, *string.punctuation, "é", "水"]]
    seen = dict(reversed(scored))
    pieces = [(token, seen[token]) for token in dict.fromkeys(token for token, _ in scored)]
    made = Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3))
    made.normalizer = normalizers.Sequence([normalizers.Replace(" {2,}", " ")])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    return _finished(made, "<s>", "</s>", "<unk>", "<pad>", "<mask>", {})


def _words_of_bytes() -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer of CLIP's kind: lower case, words that end in </w>, and the two special tokens behind all others."""
    made = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    made.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    words = pre_tokenizers.Split(
        Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet += [f"{one}</w>" for one in alphabet]
    # Of more words than these, it would learn now one more, now one less.
    sizes: dict[str, Any] = {"vocab_size": 650, "special_tokens": alphabet, "show_progress": False}
    made.train_from_iterator(CORPUS.split("\n"), trainers.BpeTrainer(end_of_word_suffix="</w>", **sizes))
    begin, end = "<|startoftext|>", "<|endoftext|>"
    state = json.loads(made.to_str())
    state["added_tokens"], model = [], state["model"]
    size = len(model["vocab"])
    model["vocab"] |= {begin: size, end: size + 1}
    model["unk_token"] = end
    made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([begin, end])
    made.post_processor = processors.RobertaProcessing(
        (end, size + 1), (begin, size), trim_offsets=False, add_prefix_space=False
    )
    return made, {"bos_token": begin, "eos_token": end, "unk_token": end, "pad_token": end}


def _without_beginning(made: Any) -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer of SigLIP's kind: a text ends in the token that it is filled up with."""
    end = [("</s>", made.token_to_id("</s>"))]
    made.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=end)
    return made, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}


def _finished(
    made: Any, cls: str, sep: str, unk: str, pad: str, mask: str, settings: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    angle = cls == "<s>"
    made.add_special_tokens([*(token for token in (cls, sep, unk, pad)), AddedToken(mask, lstrip=angle)])
    around = [(token, made.token_to_id(token)) for token in (cls, sep)]
    between = f"{sep} {sep}" if angle else f"{sep}"
    pair = f"{cls} $A {between} $B:1 {sep}:1" if not angle else f"{cls} $A {between} $B {sep}"
    made.post_processor = processors.TemplateProcessing(single=f"{cls} $A {sep}", pair=pair, special_tokens=around)
    names = {"cls_token": cls, "sep_token": sep, "unk_token": unk, "pad_token": pad, "mask_token": mask}
    return made, names | settings
