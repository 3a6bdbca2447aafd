"""Texts to token ids: checked one by one, cut to the length, with the model's special tokens.

A text that is wrong becomes an error that names the rule; the caller says which text it was.
"""

import re
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weir.embedding.texts import (
    AS_THE_FILES_SAY,
    AS_THE_SERVER,
    TOO_LONG,
    Text,
    Tokenized,
    TokenizeOptions,
    TokenizerOptions,
)
from weir.embedding.tokens.files import load_pieces, named
from weir.errors import InvalidRequest, SettingsError


def split_ids(ids: Sequence[int], words: Sequence[int | None], room: int, overlap: int) -> list[list[int]]:
    """Return pieces of at most `room` tokens, each sharing `overlap` tokens with the one before.

    `words` says of each token which word it is part of. A word that alone is longer than a piece is cut inside.
    """
    pieces: list[list[int]] = []
    start = 0
    while True:
        stop = _stop(words, start, room, overlap)
        pieces.append(list(ids[start:stop]))
        if stop >= len(ids):
            return pieces
        start = stop - overlap


def _stop(words: Sequence[int | None], start: int, room: int, overlap: int) -> int:
    full = start + room
    if full >= len(words):
        return len(words)
    stop = full
    while stop > start + overlap and words[stop] == words[stop - 1] is not None:
        stop -= 1
    return stop if stop > start + overlap else full


class SpecialTokens(NamedTuple):
    """Token ids before, between and after. One text: `first + ids + last`; two: `first + a + middle + b + end`."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def room(self, max_length: int, *, pair: bool) -> int:
        """Return how many tokens of the text, or of both, fit."""
        special = len(self.middle) + len(self.end) if pair else len(self.last)
        return max_length - len(self.first) - special


def read_template(pieces: Any) -> SpecialTokens:
    """See what the tokenizer's own rules put around a text, by giving it one that is a token of the vocabulary."""
    added = pieces.get_added_tokens_decoder()
    sample = added[min(added)].content if added else "a"
    one, two = pieces.encode(sample), pieces.encode(sample, sample)
    first, last = _around(one.ids, one.sequence_ids, (0,))
    _, end = _around(two.ids, two.sequence_ids, (0, 1))
    own = two.sequence_ids
    middle = two.ids[len(own) - own[::-1].index(0) : own.index(1)] if 0 in own and 1 in own else []
    return SpecialTokens(tuple(first), tuple(last), tuple(middle), tuple(end))


def _around(ids: list[int], own: list[int | None], texts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    places = [place for place, text in enumerate(own) if text in texts]
    if not places:
        return [], []
    return ids[: places[0]], ids[places[-1] + 1 :]


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens two texts of these lengths keep, so that both fit: the longer one is cut first.

    As in the library: of two that are both cut, the second keeps the odd token, unless the first was the longer.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = room - short
    if long < short:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


SHOWN = 40  # characters of a text in an error


class CheckedText(NamedTuple):
    """A text, found valid: one or two texts, one or two lists of words, or the ids."""

    texts: tuple[str, ...] = ()
    words: tuple[list[str], ...] = ()
    ids: list[int] | None = None


def read_text(text: Any, separator: str | None, vocab_size: int) -> CheckedText:
    """Find out what a text is, and whether it is one. Raises InvalidRequest naming the rule."""
    if isinstance(text, str):
        check_string(text, "the text")
        return CheckedText(texts=_cut_string(text, separator))
    if isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text):
        for part, name in zip(text, ("the first text of the pair", "the second text of the pair"), strict=True):
            check_string(part, name)
        return CheckedText(texts=text)
    if isinstance(text, Sequence) and not isinstance(text, bytes | bytearray | memoryview):
        return _read_list(text, separator, vocab_size)
    raise InvalidRequest(f"{_shown(text)} must be a string, a pair of strings, a list of words or a list of token ids")


def check_string(text: str, name: str) -> None:
    """Raise InvalidRequest if `text` is empty, has a NUL, or is not valid Unicode."""
    if not text:
        raise InvalidRequest(f"{name} is empty: it must have at least one character")
    if "\0" in text:
        raise InvalidRequest(f"{name} has a NUL at character {text.index(chr(0))}: texts must have none")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{name} is not valid Unicode: character {error.start} is half of a surrogate pair"
            ) from None


def _read_list(items: Sequence[Any], separator: str | None, vocab_size: int) -> CheckedText:
    if not items:
        raise InvalidRequest("the list is empty: it must have at least one word or token id")
    if isinstance(items[0], str):
        for place, word in enumerate(items):
            if not isinstance(word, str):
                raise InvalidRequest(f"word {place} is {_shown(word)}: all must be strings")
            check_string(word, f"word {place}")
        return CheckedText(words=_cut_words(list(items), separator))
    for place, number in enumerate(items):
        if type(number) is not int:
            raise InvalidRequest(
                f"token id {place} is {_shown(number)}: must be whole numbers, or words that are strings"
            )
        if not 0 <= number < vocab_size:
            raise InvalidRequest(f"token id {place} is {number}: the model's vocabulary has 0 to {vocab_size - 1}")
    return CheckedText(ids=list(items))


def _cut_string(text: str, separator: str | None) -> tuple[str, ...]:
    """Cut at the last separator between spaces, as bert-as-service does; what has nothing beside it is no pair."""
    if separator is None or separator not in text:
        return (text,)
    found = re.fullmatch(rf"(.*\S.*) {re.escape(separator)} (.*\S.*)", text, re.DOTALL)
    return (found[1].strip(), found[2].strip()) if found else (text,)


def _cut_words(words: list[str], separator: str | None) -> tuple[list[str], ...]:
    if separator is None or separator not in words:
        return (words,)
    place = words.index(separator)
    parts = words[:place], words[place + 1 :]
    if not all(parts):
        raise InvalidRequest(
            f"word {place} is {separator!r}, which stands between two texts: there must be words on both sides"
        )
    return parts


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:SHOWN]}{'...' if len(text) > SHOWN else ''} ({type(value).__name__})"


# A text is first read only so far, in characters for each token wanted: English has 4 to 5.
GENEROUS = 12
# Where a text can be cut so that the tokens before stay what they are: words do not reach over this space.
BETWEEN_WORDS = re.compile(r"(?<=\w) (?=[^\W_])")
SPACES = re.compile(r"\s{2,}")
LONGEST_WORD = 1_000  # characters; WordPiece takes one of more than 100 for the unknown token
# Letters and digits, and pictures, that are one word; others are words of their own.
LONG_WORD = re.compile(rf"(?:[^\W_\u2e80-\U0010ffff]|[\u2600-\u2767\U0001f000-\U0001faff]){{{LONGEST_WORD},}}")
UNSURE = 128  # tokens before a cut within a word that may depend on what is behind it; a word has 100 at most
GROWTH = 8  # times as much of a text is read if what was read has too few tokens
FAR = 64  # times as much of it, where it is not known that tokens depend on nothing behind a space
LARGE = 1 << 18  # characters from which runs are looked for
PROBE = "a \u2603 \U0001f600\u00e9"  # has what no small vocabulary knows: whether that fails is to be known at once
STOCK_SEPARATOR = "|||"  # the word that bert-as-service has between two texts
# Ways of finding words that keep to them.
LOCAL = ("BertPreTokenizer", "ByteLevel", "Metaspace", "WhitespaceSplit", "Whitespace")


class Numbered(NamedTuple):
    """A text's token ids, without special ones, and which word each is part of."""

    ids: list[int]
    words: Sequence[int | None]


class Tokenizer:
    """A model's tokenizer. Threads may share it; pickled, it is read anew from its directory."""

    def __init__(
        self, directory: Path, options: TokenizerOptions = AS_THE_FILES_SAY, *, vocab_size: int | None = None
    ) -> None:
        """Read the files in `directory`. Raises SettingsError naming the file, also if an id is not below `vocab_size`, the rows of the weights."""
        separator = options.pair_separator
        if separator is not None and not separator.strip():
            raise SettingsError(f"pair_separator={separator!r}: must have characters other than spaces")
        self.separator = separator.strip() if separator else None
        self.directory = directory
        self.options = options
        self.pieces = load_pieces(directory, options)
        self.vocabulary: dict[str, int] = self.pieces.get_vocab(with_added_tokens=True)
        top = max(self.vocabulary.values(), default=-1)
        self.vocab_size = top + 1 if vocab_size is None else vocab_size
        if not 0 <= top < self.vocab_size:
            raise SettingsError(
                f"{directory}: the tokenizer's vocabulary goes up to the id {top}, the weights have {self.vocab_size} words: they are of different models"
            )
        with named(directory):
            self.framed = read_template(self.pieces)
            self._encode([PROBE])
        self.template = self.framed if options.special_tokens else SpecialTokens()
        self.cls_id = self.framed.first[0] if self.framed.first else -1
        self.sep_id = self.framed.last[-1] if self.framed.last else -1
        added = self.pieces.get_added_tokens_decoder()
        self.pad_id = next((self.vocabulary[name] for name in ("[PAD]", "<pad>") if name in self.vocabulary), 0)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)

    @property
    def cased(self) -> bool:
        """Whether capital letters count."""
        return self.pieces.normalizer is None or self.pieces.normalizer.normalize_str("A") == "A"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.directory, self.options, self.vocab_size)

    def encode(
        self,
        texts: Sequence[Text],
        *,
        max_length: int,
        truncate: bool = True,
        tokenize_options: TokenizeOptions = AS_THE_SERVER,
    ) -> list[Tokenized | InvalidRequest]:
        """Return the tokens of each text, or the error in its place that says what rule it breaks.

        At most `max_length` tokens of a text are kept, special ones included; the tail is cut, of a pair that of the longer text first. With
        `truncate` False, a text that is too long is an error. `tokenize_options` say what holds for these texts only.
        """
        whole_words, separator = self._words_of(tokenize_options)
        found: list[CheckedText | InvalidRequest] = []
        for text in texts:
            try:
                found.append(self._read(text, separator, tokenize_options.prompt))
            except InvalidRequest as error:
                found.append(error)
        cut = iter(self._cut([read for read in found if isinstance(read, CheckedText)], max_length, whole_words))
        return [
            self._framed(next(cut), max_length, truncate, self._is_bare(read, whole_words), read.ids is not None)
            if isinstance(read, CheckedText)
            else read
            for read in found
        ]

    def split(
        self, text: Text, *, max_length: int, overlap: int = 0, tokenize_options: TokenizeOptions = AS_THE_SERVER
    ) -> list[Tokenized] | InvalidRequest:
        """Return a long text in pieces that the model can read, each with its special tokens; one piece if it is short.

        Pieces end between words, and share `overlap` tokens with the one before. Of a pair the longer text is cut into pieces, and the other
        stands beside each of them; of one that has more than half of the room, its tail is cut off, which each piece says. Token ids are
        not split, for their special tokens are the caller's. What one makes of the vectors of pieces is the caller's choice:
        the mean, weighted by their tokens, is close to the mean over the text.
        """
        whole_words, separator = self._words_of(tokenize_options)
        try:
            read = self._read(text, separator, tokenize_options.prompt)
            if read.ids is not None:
                raise InvalidRequest("token ids are not split: their special tokens are the caller's")
            template = SpecialTokens() if self._is_bare(read, whole_words) else self.template
            return self._split(self._numbered(read, whole_words), template, max_length, overlap)
        except InvalidRequest as error:
            return error

    def _is_bare(self, read: CheckedText, whole_words: bool) -> bool:
        """Tell whether no special tokens are put around a text: it has them already, or is a list of tokens that are to stay alone."""
        tokens = whole_words and len(read.words) == 1
        return read.ids is not None or (tokens and not self.options.word_special_tokens)

    def _split(self, parts: list[Numbered], template: SpecialTokens, max_length: int, overlap: int) -> list[Tokenized]:
        pair = len(parts) == 2
        room = template.room(max_length, pair=pair)
        longer = max(parts, key=lambda part: len(part.ids))
        beside = parts[0 if longer is parts[1] else 1].ids if pair else []
        kept = beside[: max(0, room // 2)]
        room -= len(kept)
        if room <= overlap:
            raise InvalidRequest(
                f"max_length={max_length}: must leave room for more than the {overlap} tokens that pieces share"
            )
        pieces = split_ids(longer.ids, longer.words, room, overlap)
        if not pair:
            return [Tokenized(_packed([*template.first, *piece, *template.last])) for piece in pieces]
        pairs = [(piece, kept) if longer is parts[0] else (kept, piece) for piece in pieces]
        return [_paired(template, *each, len(kept) < len(beside)) for each in pairs]

    def tokens(self, ids: bytes | Sequence[int]) -> list[str]:
        """Return the tokens that these ids stand for, as texts."""
        numbers = struct.unpack(f"<{len(ids) // 4}i", ids) if isinstance(ids, bytes) else ids
        return [self._names.get(number, "") for number in numbers]

    def _words_of(self, tokenize_options: TokenizeOptions) -> tuple[bool, str | None]:
        """Return whether words are tokens, and what stands between two texts, for who wants them read in this manner."""
        separator = STOCK_SEPARATOR if tokenize_options.whole_words and self.separator is None else self.separator
        return tokenize_options.whole_words or self.options.whole_words, separator

    def _read(self, text: Any, separator: str | None, prompt: str | None) -> CheckedText:
        read = read_text(text, separator, self.vocab_size)
        prompt = self.options.prompt if prompt is None else prompt
        return CheckedText(texts=(prompt + read.texts[0],)) if prompt and len(read.texts) == 1 else read

    def _cut(self, found: list[CheckedText], max_length: int, whole_words: bool) -> list[list[list[int]]]:
        """Return the ids of the one or two parts of each text, without special tokens. All strings go to the library at once."""
        enough = GENEROUS * max_length + 64
        heads = [self._head(text, enough) for read in found for text in read.texts]
        cut = iter([piece.ids for piece in self._encode(heads)] if heads else [])
        given = iter(heads)
        parts: list[list[list[int]]] = []
        for read in found:
            if read.ids is not None:
                parts.append([read.ids])
            elif read.words:
                parts.append([self._words(words, whole_words) for words in read.words])
            else:
                parts.append([self._whole(text, next(given), next(cut), max_length) for text in read.texts])
        return parts

    def _encode(self, texts: list[str]) -> Any:
        with named(self.directory):
            return self.pieces.encode_batch_fast(texts, add_special_tokens=False)

    def _head(self, text: str, enough: int) -> str:
        """Return so much of a long text as has most likely more tokens than are wanted; if it can be, it ends between two words."""
        if not self._local:
            enough *= FAR
        if len(text) <= enough:
            return text
        place = BETWEEN_WORDS.search(text, enough, enough + LONGEST_WORD) if self._local else None
        return text[: place.start() if place else enough]

    def _whole(self, text: str, head: str, ids: list[int], max_length: int) -> list[int]:
        """Return the ids, of more and more of the text as long as those of its head are too few to say that it is too long.

        Only what can count is read: a text of megabytes without a space would take gigabytes in the library, which keeps them.
        """
        collapsed = False
        while len(head) < len(text) and len(ids) <= max_length + self._unsure(text, head):
            size = GROWTH * len(head)
            if not collapsed and size > LARGE:
                text, collapsed = self._without_runs(text), True
            head = text if len(text) <= size else self._head(text, size if self._local else size // FAR)
            ids = self._encode([head])[0].ids
        return ids

    def _unsure(self, text: str, head: str) -> int:
        """Return how many of the last tokens of `head` may be others than in the text: none if it ends between two words."""
        return 0 if self._local and BETWEEN_WORDS.match(text, len(head)) else UNSURE

    def _without_runs(self, text: str) -> str:
        """Return a text that has the same tokens, without what is long and no more than one token: spaces, and words beyond all lengths."""
        if not self._wordpiece:
            return text
        return LONG_WORD.sub(lambda found: found[0][:LONGEST_WORD], SPACES.sub(" ", text))

    def _words(self, words: list[str], whole: bool) -> list[int]:
        """Return the ids of words: those in the vocabulary as they are, others by their pieces, or as the unknown token."""
        if whole:
            return [self.vocabulary.get(word, self._unknown) for word in words]
        if not self._wordpiece:
            ids: list[int] = self._spaced.encode(words, is_pretokenized=True, add_special_tokens=False).ids
            return ids
        strange = [word for word in words if word not in self.vocabulary]
        cut = iter(self._encode(strange) if strange else [])
        ids = []
        for word in words:
            ids += [self.vocabulary[word]] if word in self.vocabulary else next(cut).ids
        return ids

    def _numbered(self, read: CheckedText, whole_words: bool) -> list[Numbered]:
        """Return the one or two parts of a text."""
        if read.texts:
            with named(self.directory):
                encodings = self.pieces.encode_batch(list(read.texts), add_special_tokens=False)
            return [Numbered(encoding.ids, encoding.word_ids) for encoding in encodings]
        return [self._numbered_words(words, whole_words) for words in read.words]

    def _numbered_words(self, words: list[str], whole: bool) -> Numbered:
        if not (whole or self._wordpiece):
            encoding = self._spaced.encode(words, is_pretokenized=True, add_special_tokens=False)
            return Numbered(encoding.ids, encoding.word_ids)
        each = [self._words([word], whole) for word in words]
        return Numbered(
            [number for ids in each for number in ids], [place for place, ids in enumerate(each) for _ in ids]
        )

    def _framed(
        self, parts: list[list[int]], max_length: int, truncate: bool, bare: bool, ready: bool
    ) -> Tokenized | InvalidRequest:
        """Put the special tokens around and between, unless it is to be `bare`, after cutting what does not fit. What is `ready` has them
        already."""
        template = SpecialTokens() if bare else self.template
        pair = len(parts) == 2
        room = template.room(max_length, pair=pair)
        length = sum(map(len, parts))
        if length > room:
            if not truncate:
                return InvalidRequest(
                    f"the text has more than the {max_length} tokens that the model reads, and may not be cut",
                    details={TOO_LONG: max_length},
                )
            if room < len(parts):
                return InvalidRequest(
                    f"max_length={max_length}: must leave room for the text beside the special tokens"
                )
        if not length and not template.first:
            return InvalidRequest("the text has no tokens, and none are added")
        first = parts[0]
        if not pair:
            ids = self._shortened(first, room) if ready else [*template.first, *first[:room], *template.last]
            return Tokenized(_packed(ids), 0, length > room, ready and self._is_foreign(first))
        keep, other = shares(len(first), len(parts[1]), room)
        return _paired(template, first[:keep], parts[1][:other], length > room)

    def _is_foreign(self, ids: list[int]) -> bool:
        """Tell whether this tokenizer would make other ids of the text that these stand for, special ones aside. With more special tokens than
        one text has, as pairs and texts with unknown words have, nobody knows what the text was: they are taken as they are."""
        own = [number for number in ids if number not in self.special_ids]
        if len(ids) - len(own) > len(self.template.first) + len(self.template.last):
            return False
        text = self.pieces.decode(own, skip_special_tokens=True)
        if not text or "\0" in text:
            return bool(own)
        (again,) = self._cut([CheckedText(texts=(text,))], 2 * len(ids), whole_words=False)
        return [number for number in again[0] if number not in self.special_ids] != own

    def _shortened(self, ids: list[int], room: int) -> list[int]:
        """Cut the tail of ids that have their special tokens already; the last of them stays."""
        if len(ids) > room and ids[-1] in self.special_ids:
            return [*ids[: room - 1], ids[-1]]
        return ids[:room]

    @cached_property
    def _names(self) -> dict[int, str]:
        return {number: token for token, number in self.vocabulary.items()}

    @cached_property
    def _wordpiece(self) -> bool:
        return type(self.pieces.model).__name__ == "WordPiece"

    @cached_property
    def _unknown(self) -> int:
        return next((self.vocabulary[name] for name in ("[UNK]", "<unk>") if name in self.vocabulary), self.pad_id)

    @cached_property
    def _local(self) -> bool:
        """Whether a text's first tokens depend on nothing behind a space between two words."""
        state = msgspec.json.decode(self.pieces.to_str(), type=_Description)
        steps = state.pre_tokenizer or {}
        kinds = steps.get("pretokenizers", [steps])
        keep = all(
            step.get("type") in LOCAL and step.get("split", True) and step.get("use_regex", True) for step in kinds
        )
        return keep and not any(" " in token["content"] for token in state.added_tokens)

    @cached_property
    def _spaced(self) -> Any:
        """The tokenizer for words: bytes of a word begin with those of a space, as they do within a text."""
        step = self.pieces.pre_tokenizer
        if type(step).__name__ != "ByteLevel" or step.add_prefix_space:
            return self.pieces
        import tokenizers

        spaced = tokenizers.Tokenizer.from_str(self.pieces.to_str())
        spaced.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        return spaced


class _Description(msgspec.Struct):
    """What is looked at of a tokenizer's description."""

    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def _paired(template: SpecialTokens, first: list[int], second: list[int], truncated: bool) -> Tokenized:
    before = [*template.first, *first, *template.middle]
    return Tokenized(_packed([*before, *second, *template.end]), len(before), truncated)


def _packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _again(directory: Path, options: TokenizerOptions, vocab_size: int) -> Tokenizer:
    return Tokenizer(directory, options, vocab_size=vocab_size)
