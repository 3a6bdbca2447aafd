"""A model's tokenizer: texts to token ids, with the model's special tokens, truncated to a length or split into pieces.

Each text is checked by itself. A text that breaks a rule becomes an error that names the rule; the caller adds which text it was. Most texts are tokenized by
looking their words up.
"""

import re
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weir.errors import InvalidRequest, SettingsError
from weir.text_models.formats import read_optional
from weir.text_models.late_interaction import QUERY, LateTokens
from weir.text_models.texts import (
    JUDGE_AFTER,
    JUDGE_BEFORE,
    JUDGE_INSTRUCTION,
    JUDGE_PAIR,
    NO_TOKENIZER_OPTIONS,
    TOO_LONG,
    CheckedText,
    Text,
    TokenDetail,
    Tokenized,
    TokenizerOptions,
    TokenRule,
    parse_text,
)
from weir.text_models.tokenizer_files import (
    SpecialTokens,
    as_settings_error,
    gives_types,
    load_tokenizer,
    read_template,
    read_type_lead,
    sample_text,
    special_tokens,
)

MOST_WORDS = 1 << 14  # that are remembered, about 4 MB; then all are forgotten
LONGEST_KNOWN = 64  # characters of a word that is remembered
LONGEST_TEXT = 4_000  # characters of a text whose words are looked up
NEW_AT_ONCE = 4  # words that a text may have that are not known, where it must be tokenized within microseconds

_PUNCTUATION = "!-/:-@\\[-`{-~\u2010-\u2027"
WORD = re.compile(rf"[^ \t\n\r{_PUNCTUATION}]+|[{_PUNCTUATION}]")
# The package takes no halves of surrogate pairs.
_KNOWABLE = re.compile(rf"[^ \t\n\r{_PUNCTUATION}\ud800-\udfff]{{1,{LONGEST_KNOWN}}}|[{_PUNCTUATION}]")

# Normalizers that change each word by itself.
_NORMALIZERS = ("BertNormalizer", "Lowercase")


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32, little-endian."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Return the token ids that `pack_ids` packed."""
    ids = array("i", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class KnownWords:
    """The token ids of words. `encode` returns the ids of each of some words, without special tokens; `special` are the tokens that texts may spell out.

    Threads may share it.

    A WordPiece tokenizer of BERT's kind divides a text at spaces and around punctuation, and turns each word into tokens by itself. So the tokens of a text are
    those of its words, one after the other, and a word always has the same ones. To look 30 words up takes a few microseconds, a tenth of what the package
    tokenizers takes for them.

    Where a word ends is known for spaces, and for the punctuation of ASCII and of typographers; what stands between, of any characters, counts as one word,
    which the package may divide further. For texts with long words, and those in which a special token is written out, `packed` returns None, and the package
    tokenizes the whole text.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]], special: Sequence[str]) -> None:
        self._encode = encode
        self._known: dict[str, bytes] = {}  # packed: a list of numbers is spread over memory, and takes longer to read
        self._beginnings = {character for token in special for character in (token[0].lower(), token[0].upper())}
        self._special = re.compile("|".join(map(re.escape, special)), re.IGNORECASE)

    def packed(self, text: str, new: float) -> bytes | None:
        """Return the ids of `text` as `pack_ids` does; None if it must be tokenized as a whole, or has more than `new` words that are not known yet."""
        if len(text) > LONGEST_TEXT or (any(map(text.__contains__, self._beginnings)) and self._special.search(text)):
            return None
        words = WORD.findall(text)
        try:
            return b"".join(map(self._known.__getitem__, words))
        except KeyError:
            found = self._learned(words, new)
        return None if found is None else b"".join(map(found.__getitem__, words))

    def ids(self, text: str, new: float) -> list[int] | None:
        """Return what `packed` does as a list."""
        packed = self.packed(text, new)
        return None if packed is None else unpack_ids(packed)

    def _learned(self, words: list[str], new: float) -> dict[str, bytes] | None:
        """Return the ids of each of `words`, also of those that were not known; None as `packed` does."""
        found = {word: self._known.get(word) for word in words}
        missing = [word for word, ids in found.items() if ids is None]
        if len(missing) > new or not all(map(_KNOWABLE.fullmatch, missing)):
            return None
        learned = dict(zip(missing, map(pack_ids, self._encode(missing)), strict=True))
        if len(self._known) + len(learned) > MOST_WORDS:
            self._known.clear()
        self._known.update(learned)
        return {word: learned[word] if ids is None else ids for word, ids in found.items()}


def splits_into_words(state: dict[str, Any]) -> bool:
    """Return whether the tokenizer with this description (`tokenizer.json`) turns each word that `WORD` finds into tokens by itself."""
    normalizer = state.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    return (
        (state.get("model") or {}).get("type") == "WordPiece"
        and (state.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and all(step.get("type") in _NORMALIZERS for step in steps)
    )


def split_ids(ids: Sequence[int], words: Sequence[int | None], room: int) -> list[list[int]]:
    """Split token ids into pieces of at most `room` tokens.

    Pieces end between words: `words` has for each token the index of its word, None for a token of no word. Only a word that does not fit into a
    piece is cut.
    """
    pieces: list[list[int]] = []
    start = 0
    while not pieces or start < len(ids):
        full = stop = min(start + room, len(ids))
        while full < len(ids) and stop > start and words[stop] == words[stop - 1] is not None:
            stop -= 1
        stop = stop if stop > start else full
        pieces.append(list(ids[start:stop]))
        start = stop
    return pieces


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens each of two texts keeps so that both fit into `room` tokens. The longer text is cut first.

    The result is that of the package tokenizers (truncation strategy "longest_first"): if both texts are cut and `room` is odd, the longer text
    keeps the extra token, and the second text if both are equally long.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = room - short
    if long < short:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


# The start of a long text is tokenized first: this many characters for each token wanted. English has 4 to 5 characters per token.
CHARACTERS_PER_TOKEN = 12
# A space at which a text can be cut without changing the tokens before it.
BETWEEN_WORDS = re.compile(r"(?<=\w) (?=[^\W_])")
SPACES = re.compile(r"\s{2,}")
LONGEST_WORD = 1_000  # characters; WordPiece makes the unknown token of a word of more than 100
# A run of letters, digits and emoji that WordPiece takes for one word. East Asian characters are words of their own. A search that could begin within a
# word would read each word as many times as it has characters.
_OF_WORD = r"(?:[^\W_\u2e80-\U0010ffff]|[\u2600-\u2767\U0001f000-\U0001faff])"
LONG_WORD = re.compile(rf"(?<!{_OF_WORD}){_OF_WORD}{{{LONGEST_WORD},}}")
UNCERTAIN_TOKENS = 128  # tokens before a cut inside a word that the rest of the word may change; a word has at most 100
GROWTH = 8  # if the start of a text has too few tokens, this many times as much of the text is tokenized
NONLOCAL_FACTOR = 64  # the start is this many times as long where tokens may depend on text behind a space
RUNS_FROM = 1 << 18  # characters; in longer parts of a text, runs of spaces and overlong words are shortened first
MOST_SPLIT = 1 << 20  # characters, or words, of a text that is split: all of it is tokenized at once
PROBE = "a \u2603 \U0001f600\u00e9"  # characters that a small vocabulary lacks: a tokenizer that fails at them fails when it is loaded
STOCK_SEPARATOR = "|||"  # the word that separates the two texts of a pair in bert-as-service
# Pre-tokenizers whose words do not depend on text behind the next space.
LOCAL_PRE_TOKENIZERS = ("BertPreTokenizer", "ByteLevel", "Metaspace", "WhitespaceSplit", "Whitespace")


class IdsWithWords(NamedTuple):
    """The token ids of one text without special tokens, and for each token the index of its word (None: of no word)."""

    ids: list[int]
    words: Sequence[int | None]


class Tokenizer:
    """A model's tokenizer. Threads may share it. A pickle holds the directory and the options; unpickling reads the files again.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        vocabulary: token ids by token, special tokens included.
        vocab_size: all valid token ids are below this.
        full_template: the special tokens that the model's files put around texts.
        template: the special tokens that this tokenizer puts around texts: none if the options switch them off.
        late: how it makes queries and documents of late interaction; None for others.
        type_lead: how many special tokens before the second text of a pair have the type of that text; None if the model is given no types.
        cls_id, sep_id: the first and the last special token around one text; -1 if there is none.
        pad_id: the padding token; 0 if the vocabulary has none.
        fill_id: the token that texts are filled up with, see `TokenizerOptions.fill`; -1 if they are not.
        special_ids: the ids of all special tokens.
        unweighted_ids: the special tokens that are no terms of a text: those around texts, padding, and the unknown token. A mask is one.
    """

    def __init__(
        self, directory: Path, options: TokenizerOptions = NO_TOKENIZER_OPTIONS, *, vocab_size: int | None = None
    ) -> None:
        """Load the tokenizer from the files in `directory`.

        `vocab_size` is the number of rows of the model's word embeddings (None: as many as the tokenizer has ids). Raises SettingsError naming
        the file and the rule, also if an id of the tokenizer is not below `vocab_size`.
        """
        separator = options.pair_separator
        if separator is not None and not separator.strip():
            raise SettingsError(f"pair_separator={separator!r}: must have characters other than spaces")
        self.separator = separator.strip() if separator else None
        self.directory = directory
        self.options = options
        self.backend = load_tokenizer(directory, options)
        self.vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder()
        top = max(self.vocabulary.values(), default=-1)
        self.vocab_size = top + 1 if vocab_size is None else vocab_size
        own = max((number for number in self.vocabulary.values() if number not in added), default=-1)
        if not 0 <= own < self.vocab_size:
            raise SettingsError(
                f"{directory}: the tokenizer's vocabulary goes up to the id {own}, the weights have {self.vocab_size} words: they are of different models"
            )
        self._rowless = {number: token.content for number, token in added.items() if number >= self.vocab_size}
        with as_settings_error(directory):
            self.full_template = read_template(self.backend)
            self.type_lead = read_type_lead(self.backend, sample_text(self.backend)) if gives_types(directory) else None
            self._encode([PROBE])
        self.template = self.full_template if options.special_tokens else SpecialTokens()
        if options.judges:
            with as_settings_error(directory):
                before, after = (self._encode([text])[0].ids for text in (JUDGE_BEFORE, JUDGE_AFTER))
            self.template = SpecialTokens(tuple(before), tuple(after))
        self.cls_id = self.full_template.first[0] if self.full_template.first else -1
        self.sep_id = self.full_template.last[-1] if self.full_template.last else -1
        if error := self._without_row(self.template):
            raise SettingsError(f"{directory}: the tokenizer adds to every text {error}: they are of different models")
        self.pad_id = next((self.vocabulary[name] for name in ("[PAD]", "<pad>") if name in self.vocabulary), 0)
        self.fill_id = self._padding() if options.fill else -1
        self.late = self._late_tokens(options)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        around = {*self.full_template.first, *self.full_template.last}
        self.unweighted_ids = self.special_ids & {*around, self.pad_id, self._unknown}

    def _padding(self) -> int:
        """Return the id of the token that the files call padding. Raises SettingsError if the vocabulary lacks it."""
        config = read_optional(self.directory / "tokenizer_config.json")
        name = special_tokens(self.directory, config, {"pad": "<pad>"})["pad"]
        if name not in self.vocabulary:
            raise SettingsError(f"{config.path}: pad_token={name!r}: must be a token: texts are filled up with it")
        return self.vocabulary[name]

    def _late_tokens(self, options: TokenizerOptions) -> LateTokens | None:
        if options.late is None:
            return None
        mask = next((self.vocabulary[name] for name in ("[MASK]", "<mask>") if name in self.vocabulary), None)
        try:
            return LateTokens(options.late, self.vocabulary, mask, self._unknown)
        except SettingsError as error:
            raise SettingsError(f"{self.directory}: {error.message}") from None

    @property
    def cased(self) -> bool:
        """Whether the tokenizer distinguishes capital letters from small ones."""
        return self.backend.normalizer is None or self.backend.normalizer.normalize_str("A") == "A"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.directory, self.options, self.vocab_size)

    def encode(self, texts: Sequence[Text], rule: TokenRule) -> list[Tokenized | InvalidRequest]:
        """Tokenize texts: strings, pairs of strings, lists of words, or lists of token ids that include special tokens.

        Return for each text its tokens, or the error that names the rule which the text breaks.
        """
        found = self._encoded(texts, rule, inf)
        assert found is not None  # it is None only where new words are limited
        return found

    def at_once(self, texts: Sequence[Text], rule: TokenRule) -> list[Tokenized | InvalidRequest] | None:
        """Return what `encode` returns if that takes microseconds for each text, as nearly all words are known; else None."""
        if len(texts) == 1 and type(text := texts[0]) is str and text and "\0" not in text:
            one = self._one_at_once(text, rule)
            if one is not None:
                return [one]
        if not all(isinstance(text, (str, tuple)) for text in texts):
            return None
        return self._encoded(texts, rule, NEW_AT_ONCE)

    def _one_at_once(self, text: str, rule: TokenRule) -> Tokenized | InvalidRequest | None:
        """Return the tokens of a text by its words alone, as most are; None if it may be a pair, or must be tokenized as a whole."""
        words = self._known_words
        if (
            words is None
            or self.separator is not None
            or rule.whole_words
            or self.late is not None
            or self.fill_id >= 0
        ):
            return None
        prompt = self.options.prompt if rule.prompt is None else rule.prompt
        packed = words.packed(prompt + text if prompt else text, NEW_AT_ONCE)
        if packed is None:
            return None
        first, last = self._packed_ends
        ids = first + packed + last
        if packed and len(ids) <= 4 * rule.max_length:
            return Tokenized(ids)
        return self._with_special_tokens([unpack_ids(packed)], rule, self.template)

    @cached_property
    def _packed_ends(self) -> tuple[bytes, bytes]:
        """The special tokens before and after a single text."""
        return pack_ids(self.template.first), pack_ids(self.template.last)

    def _encoded(self, texts: Sequence[Text], rule: TokenRule, new: float) -> list[Tokenized | InvalidRequest] | None:
        """Return the tokens or the error of each text; None if one would have to be tokenized as a whole and `new`, see KnownWords.ids, is limited."""
        whole_words, separator = self._word_rules(rule)
        prompt = self.options.prompt if rule.prompt is None else rule.prompt
        checked: list[CheckedText | InvalidRequest] = []
        for text in texts:
            try:
                checked.append(self._check(text, separator, rule.prompt))
            except InvalidRequest as error:
                checked.append(error)
        good = [each for each in checked if isinstance(each, CheckedText)]
        ids = self._ids(good, rule.max_length, whole_words, rule.truncate_left, new)
        if ids is None:
            return None
        parts, is_query = iter(ids), self.late is not None and self.late.is_query(prompt)
        found: list[Tokenized | InvalidRequest] = []
        for each in checked:
            if isinstance(each, InvalidRequest):
                found.append(each)
            elif self.late is not None:
                found.append(self._interacting(next(parts), rule, each.ids is not None, is_query))
            else:
                template = self._template_of(each, whole_words)
                found.append(self._with_special_tokens(next(parts), rule, template, ready=each.ids is not None))
        return found

    def split(self, text: Text, rule: TokenRule) -> list[Tokenized] | InvalidRequest:
        """Tokenize a text of any length into pieces that have at most as many tokens as the rule allows, each with special tokens.

        Return an error if the text is invalid.

        A piece ends between two words. Of a pair, the longer text is split, and
        the other text is repeated in each piece; it keeps at most half of the room, and each piece is marked as truncated if that cuts it.
        Token ids are not split: they include special tokens that the caller placed.

        The mean of the pieces' vectors, weighted by their tokens, is close to the mean over the whole text.
        """
        whole_words, separator = self._word_rules(rule)
        try:
            checked = self._check(text, separator, rule.prompt)
            if self.late is not None:
                raise InvalidRequest("texts of late interaction are not split: leave split out")
            if checked.ids is not None:
                raise InvalidRequest("token ids are not split: their special tokens are the caller's")
            for part in (*checked.texts, *checked.words):
                if len(part) > MOST_SPLIT:
                    what = "characters" if isinstance(part, str) else "words"
                    raise InvalidRequest(
                        f"the text has {len(part)} {what}, must have at most {MOST_SPLIT} to be read in pieces: send it in parts"
                    )
            parts = self._with_words(checked, whole_words)
            if error := self._without_row(part.ids for part in parts):
                raise InvalidRequest(f"the text contains {error}: leave it out")
            return self._split(parts, self._template_of(checked, whole_words), rule.max_length)
        except InvalidRequest as error:
            return error

    def _template_of(self, checked: CheckedText, whole_words: bool) -> SpecialTokens:
        """Return the special tokens around a text: none for token ids, which include them, and the options can switch them off for lists of whole words."""
        is_word_list = whole_words and len(checked.words) == 1
        is_bare = checked.ids is not None or (is_word_list and not self.options.word_special_tokens)
        return SpecialTokens() if is_bare else self.template

    def _split(self, parts: list[IdsWithWords], template: SpecialTokens, max_length: int) -> list[Tokenized]:
        pair = len(parts) == 2
        room = template.room(max_length, pair=pair)
        longer = max(parts, key=lambda part: len(part.ids))
        other = parts[0 if longer is parts[1] else 1].ids if pair else []
        kept = other[: max(0, room // 2)]
        room -= len(kept)
        if room <= 0:
            raise InvalidRequest(f"max_length={max_length}: must leave room for text as well as the special tokens")
        pieces = split_ids(longer.ids, longer.words, room)
        if not pair:
            return [self._filled([*template.first, *piece, *template.last], max_length) for piece in pieces]
        pairs = [(piece, kept) if longer is parts[0] else (kept, piece) for piece in pieces]
        return [_pack_pair(template, *each, len(kept) < len(other)) for each in pairs]

    def details(self, text: str, *, special: bool = True, prompt: str | None = None) -> list[TokenDetail]:
        """Return the tokens of a whole text, none cut off, with the special tokens if `special`. For `prompt` see TokenRule.

        Raises InvalidRequest for a text that is invalid or too long to be tokenized as a whole.
        """
        checked = self._check(text, None, prompt)
        (whole,) = checked.texts
        if len(whole) > RUNS_FROM:
            raise InvalidRequest(
                f"the text has {len(whole)} characters, must have at most {RUNS_FROM} to be shown in tokens"
            )
        with as_settings_error(self.directory):
            found = self.backend.encode_batch([whole], add_special_tokens=special)[0]  # only this releases the GIL
        rows = zip(found.ids, found.tokens, found.special_tokens_mask, found.offsets, strict=True)
        return [
            TokenDetail(number, token, True, None, None)
            if is_special
            else TokenDetail(number, whole[start:stop], False, start, stop)
            for number, token, is_special, (start, stop) in rows
        ]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids, with `skip_special` without the special tokens. Raises InvalidRequest for a number that is no id of a token."""
        for index, number in enumerate(ids):
            if type(number) is not int or not 0 <= number < self.vocab_size:
                raise InvalidRequest(
                    f"token id {index} is {number!r:.40}: the model's vocabulary has 0 to {self.vocab_size - 1}"
                )
        return self._decoded(ids, skip_special)

    def _decoded(self, ids: Sequence[int], skip_special: bool) -> str:
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)  # only this releases the GIL
        return str(text)

    def tokens(self, ids: bytes | Sequence[int]) -> list[str]:
        """Return the tokens of these ids, which are integers or int32 little-endian bytes; "" for an id that the vocabulary lacks."""
        numbers = struct.unpack(f"<{len(ids) // 4}i", ids) if isinstance(ids, bytes) else ids
        return [self._names.get(number, "") for number in numbers]

    def _word_rules(self, rule: TokenRule) -> tuple[bool, str | None]:
        """Return whether each given word is one token, and the separator of pairs, for texts with this rule."""
        separator = STOCK_SEPARATOR if rule.whole_words and self.separator is None else self.separator
        return rule.whole_words or self.options.whole_words, separator

    def _check(self, text: Any, separator: str | None, prompt: str | None) -> CheckedText:
        checked = parse_text(text, separator, self.vocab_size)
        prompt = self.options.prompt if prompt is None else prompt
        pair_text = JUDGE_PAIR if self.options.judges else self.options.pair_text
        if pair_text and len(checked.texts) == 2:
            query, document = checked.texts
            whole = pair_text.format(instruction=prompt or JUDGE_INSTRUCTION, query=query, document=document)
            return CheckedText(texts=(whole,))
        if self.late is not None and len(checked.texts) == 2:
            befores = (self.late.query.text, self.late.document.text)
            return CheckedText(texts=tuple(before + part for before, part in zip(befores, checked.texts, strict=True)))
        prompt = self.late.before(prompt) if self.late is not None and prompt is not None else prompt
        return CheckedText(texts=(prompt + checked.texts[0],)) if prompt and len(checked.texts) == 1 else checked

    def _ids(
        self, checked: list[CheckedText], max_length: int, whole_words: bool, left: bool = False, new: float = inf
    ) -> list[list[list[int]]] | None:
        """Return for each text the ids of its one or two parts, without special tokens. Strings with other than known words are tokenized in one call,
        or if `new` is limited, the result is None.

        Of a long string only the start is tokenized, with `left` only the end: enough for more than `max_length` tokens.
        """
        strings = [text for each in checked for text in each.texts]
        words = self._known_words
        known = [None if words is None else words.ids(text, new) for text in strings]
        if new < inf and None in known:
            return None
        size = CHARACTERS_PER_TOKEN * max_length + 64
        cut = self._tail if left else self._head
        heads = [cut(text, size) for text, ids in zip(strings, known, strict=True) if ids is None]
        encoded = iter([encoding.ids for encoding in self._encode(heads)] if heads else [])
        head, found = iter(heads), iter(known)
        parts: list[list[list[int]]] = []
        for each in checked:
            if each.ids is not None:
                parts.append([each.ids])
            elif each.words:
                parts.append([self._words_for(words, whole_words, max_length, left) for words in each.words])
            else:
                parts.append(
                    [
                        self._extend(text, next(head), next(encoded), max_length, left) if ids is None else ids
                        for text, ids in zip(each.texts, found, strict=False)
                    ]
                )
        return parts

    def _encode(self, texts: list[str]) -> Any:
        with as_settings_error(self.directory):
            return self.backend.encode_batch_fast(texts, add_special_tokens=False)

    def _head(self, text: str, size: int) -> str:
        """Return the start of a text, of about `size` characters, ending between two words where possible; a short text as it is."""
        if not self._is_local:
            size *= NONLOCAL_FACTOR
        if len(text) <= size:
            return text
        cut = BETWEEN_WORDS.search(text, size, size + LONGEST_WORD) if self._is_local else None
        return text[: cut.start() if cut else size]

    def _tail(self, text: str, size: int) -> str:
        """Return the end of a text, of about `size` characters, beginning between two words where possible; a short text as it is."""
        if not self._is_local:
            size *= NONLOCAL_FACTOR
        begin = len(text) - size
        if begin <= 0:
            return text
        cut = BETWEEN_WORDS.search(text, begin, begin + min(size, LONGEST_WORD)) if self._is_local else None
        return text[cut.start() if cut else begin :]

    def _extend(self, text: str, head: str, ids: list[int], max_length: int, left: bool = False) -> list[int]:
        """Return the ids of `text`, or of a start of it with more than `max_length` tokens, with `left` of an end; `ids` are those of its part `head`.

        The rest of the text is not tokenized: for megabytes without a space, the package would allocate gigabytes and keep them.
        """
        collapsed = False
        cut = self._tail if left else self._head
        size = len(head)  # an end that begins between two words is shorter than its size
        while len(head) < len(text) and len(ids) <= max_length + self._uncertain_tokens(text, head, left):
            size = GROWTH * max(size, len(head))
            if not collapsed and size > RUNS_FROM:
                text, collapsed = self._without_runs(text), True
            head = text if len(text) <= size else cut(text, size if self._is_local else size // NONLOCAL_FACTOR)
            ids = self._encode([head])[0].ids
        return ids

    def _uncertain_tokens(self, text: str, head: str, left: bool) -> int:
        """Return how many of the last tokens of `head` may differ from those of the text: none if `head` ends between two words.

        With `left` it is the first tokens that may differ, also where `head` begins between two words, as some tokenizers mark the beginning of a text.
        """
        if left:
            return UNCERTAIN_TOKENS
        return 0 if self._is_local and BETWEEN_WORDS.match(text, len(head)) else UNCERTAIN_TOKENS

    def _without_runs(self, text: str) -> str:
        """Return a shorter text with the same WordPiece tokens: runs of spaces and words of more than LONGEST_WORD characters are shortened."""
        if not self._is_wordpiece:
            return text
        return LONG_WORD.sub(lambda match: match[0][:LONGEST_WORD], SPACES.sub(" ", text))

    def _words_for(self, words: list[str], whole: bool, max_length: int, left: bool) -> list[int]:
        """Return the ids of words, or of so many of the first, with `left` of the last, that they have more than `max_length` tokens."""
        size = max_length + 1
        while True:
            ids = self._words(words[-size:] if left else words[:size], whole)
            if len(ids) > max_length or size >= len(words):
                return ids
            size *= GROWTH  # some words have no tokens

    def _words(self, words: list[str], whole: bool) -> list[int]:
        """Return the ids of words. A word of the vocabulary is one token; another word is tokenized, or with `whole` is the unknown token."""
        if whole:
            return [self.vocabulary.get(word, self._unknown) for word in words]
        if not self._is_wordpiece:
            (found,) = self._word_tokenizer.encode_batch_fast([words], is_pretokenized=True, add_special_tokens=False)
            ids: list[int] = found.ids
            return ids
        unknown = [word for word in words if word not in self.vocabulary]
        encoded = iter(self._encode(unknown) if unknown else [])
        ids = []
        for word in words:
            ids += [self.vocabulary[word]] if word in self.vocabulary else next(encoded).ids
        return ids

    def _with_words(self, checked: CheckedText, whole_words: bool) -> list[IdsWithWords]:
        """Tokenize all of a text; return its one or two parts."""
        if checked.texts:
            with as_settings_error(self.directory):
                encodings = self.backend.encode_batch(list(checked.texts), add_special_tokens=False)
            return [IdsWithWords(encoding.ids, encoding.word_ids) for encoding in encodings]
        return [self._words_with_places(words, whole_words) for words in checked.words]

    def _words_with_places(self, words: list[str], whole: bool) -> IdsWithWords:
        if not (whole or self._is_wordpiece):
            encoding = self._word_tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False)
            return IdsWithWords(encoding.ids, encoding.word_ids)
        each = [self._words([word], whole) for word in words]
        return IdsWithWords(
            [number for ids in each for number in ids], [index for index, ids in enumerate(each) for _ in ids]
        )

    def _interacting(
        self, parts: list[list[int]], rule: TokenRule, ready: bool, query: bool
    ) -> Tokenized | InvalidRequest:
        """Return the tokens of a query or a document of late interaction, or of a pair of both; see `_with_special_tokens` for the rest."""
        assert self.late is not None
        if len(parts) == 2:
            both = [self._interacting([part], rule, False, index == 0) for index, part in enumerate(parts)]
            for each in both:
                if isinstance(each, InvalidRequest):
                    return each
            first, second = (each for each in both if isinstance(each, Tokenized))
            return Tokenized(first.ids + second.ids, len(first.ids) // 4, first.truncated or second.truncated)
        role = self.late.query if query else self.late.document
        template = self.template._replace(first=(*self.template.first, *role.marker))
        if query and role.length:
            rule = rule._replace(max_length=role.length)
        found = self._with_special_tokens(parts, rule, template, ready=ready)
        if isinstance(found, InvalidRequest) or ready or not query:
            return found
        missing = max(self.late.expands_to - len(found.ids) // 4, 0)
        return found._replace(ids=found.ids + pack_ids([self.late.filling] * missing), second=QUERY)

    def _with_special_tokens(
        self, parts: list[list[int]], rule: TokenRule, template: SpecialTokens, *, ready: bool = False
    ) -> Tokenized | InvalidRequest:
        """Cut the one or two `parts` of a text as the rule says, and add the special tokens of `template`.

        `ready` ids are the caller's, special tokens included. Return an error if the text is too long and not to be cut, if it has no token, or if
        the greatest length has no room for it."""
        max_length, left, pair = rule.max_length, rule.truncate_left, len(parts) == 2
        room = template.room(max_length, pair=pair)
        length = sum(map(len, parts))
        if length > room:
            if not rule.truncate:
                return InvalidRequest(
                    f"the text has more than the {max_length} tokens that the model reads, and may not be cut",
                    details={TOO_LONG: max_length},
                )
            if room < len(parts):
                return InvalidRequest(
                    f"max_length={max_length}: must leave room for text as well as the special tokens"
                )
        if not length and not template.first and self.fill_id < 0:
            return InvalidRequest("the text has no tokens, and none are added")
        if error := self._without_row(parts):
            return InvalidRequest(f"the text contains {error}: leave it out")
        first = parts[0]
        if not pair:
            ids = (
                self._truncated_ids(first, room, left)
                if ready
                else [*template.first, *_kept(first, room, left), *template.last]
            )
            is_foreign = ready and self._is_foreign(first, max_length)
            return self._filled(ids, max_length)._replace(truncated=length > room, foreign=is_foreign)
        keep, other = pair_lengths(len(first), len(parts[1]), room)
        return _pack_pair(template, _kept(first, keep, left), _kept(parts[1], other, left), length > room)

    def _filled(self, ids: list[int], length: int) -> Tokenized:
        """Return a single text of these tokens, filled up to `length` tokens if the options state that."""
        missing = 0 if self.fill_id < 0 else length - len(ids)
        return Tokenized(pack_ids([*ids, *[self.fill_id] * missing]))

    def _is_foreign(self, ids: list[int], max_length: int) -> bool:
        """Return whether the ids seem to be those of another tokenizer: decoded to a text and tokenized again, they differ.

        Of more than `max_length` ids the first `max_length` are judged: the model reads no more, and a caller may send millions. Special tokens do not count. Ids with more special tokens than one text has, such as pairs and texts with unknown words, cannot be
        decoded without loss and are not foreign.
        """
        ids, is_long = ids[: max_length + UNCERTAIN_TOKENS], len(ids) > max_length + UNCERTAIN_TOKENS
        own = [number for number in ids if number not in self.special_ids]
        if len(ids) - len(own) > len(self.template.first) + len(self.template.last):
            return False
        text = self._decoded(own, True)
        if not text or "\0" in text:
            return bool(own)
        again = self._ids([CheckedText(texts=(text,))], 2 * len(ids), whole_words=False)
        assert again is not None  # it is None only where new words are limited
        found = [number for number in again[0][0] if number not in self.special_ids]
        return found[:max_length] != own[:max_length] if is_long else found != own

    def _truncated_ids(self, ids: list[int], room: int, left: bool) -> list[int]:
        """Cut the end of ids that include special tokens, with `left` their beginning. If the last id there is a special token, it is kept."""
        if left:
            return self._truncated_ids(ids[::-1], room, False)[::-1]
        if len(ids) > room and ids[-1] in self.special_ids:
            return [*ids[: room - 1], ids[-1]]
        return ids[:room]

    def _without_row(self, parts: Iterable[Iterable[int]]) -> str:
        """Return which of these tokens the model has no embedding of; "" if it has them all."""
        if not self._rowless:
            return ""
        found = next((number for part in parts for number in part if number in self._rowless), None)
        return (
            ""
            if found is None
            else f"{self._rowless[found]!r}, the token {found}, and the weights have {self.vocab_size} words"
        )

    @cached_property
    def _known_words(self) -> KnownWords | None:
        """The words whose tokens are known; None if this tokenizer does not tokenize each word by itself."""
        state = msgspec.json.decode(self.backend.to_str())
        if not splits_into_words(state):
            return None
        special = [token["content"] for token in state.get("added_tokens", [])]
        return KnownWords(lambda words: [encoding.ids for encoding in self._encode(words)], special)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {number: token for token, number in self.vocabulary.items()}

    @cached_property
    def _is_wordpiece(self) -> bool:
        return type(self.backend.model).__name__ == "WordPiece"

    @cached_property
    def _unknown(self) -> int:
        return next((self.vocabulary[name] for name in ("[UNK]", "<unk>") if name in self.vocabulary), self.pad_id)

    @cached_property
    def _is_local(self) -> bool:
        """Whether the tokens before a space between two words never depend on the text after that space."""
        state = msgspec.json.decode(self.backend.to_str(), type=_Description)
        pre_tokenizer = state.pre_tokenizer or {}
        are_local = all(
            step.get("type") in LOCAL_PRE_TOKENIZERS and step.get("split", True) and step.get("use_regex", True)
            for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer])
        )
        return are_local and not any(" " in token["content"] for token in state.added_tokens)

    @cached_property
    def _word_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` for lists of words. In byte-level BPE it puts a space before each word, as there is within a text."""
        step = self.backend.pre_tokenizer
        if type(step).__name__ != "ByteLevel" or step.add_prefix_space:
            return self.backend
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        return copy


class _Description(msgspec.Struct):
    """The parts of a tokenizer.json that decide `Tokenizer._is_local`."""

    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def _kept(ids: list[int], count: int, left: bool) -> list[int]:
    """Return the first `count` ids, with `left` the last."""
    return ids[max(len(ids) - count, 0) :] if left else ids[:count]


def _pack_pair(template: SpecialTokens, first: list[int], second: list[int], truncated: bool) -> Tokenized:
    before = [*template.first, *first, *template.middle]
    return Tokenized(pack_ids([*before, *second, *template.end]), len(before), truncated)


def _reopened(directory: Path, options: TokenizerOptions, vocab_size: int) -> Tokenizer:
    return Tokenizer(directory, options, vocab_size=vocab_size)
