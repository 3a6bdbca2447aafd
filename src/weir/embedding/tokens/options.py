"""How texts are read, as far as it is the user's choice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenizerOptions:
    """Choices that hold for all texts of a served model.

    `lowercase` overrides what the model's files say (None). `lowercase_text` lowers texts before the tokenizer sees them, as some
    sentence-transformers models ask. Without `special_tokens` none are added, without `word_special_tokens` none to one list of words that
    are tokens. `pair_separator`, such as "|||", cuts a text in two that
    belong together where it stands between spaces, or as a word of its own in a list of words. With `whole_words`, every given word
    is one token, and one that is not in the vocabulary the unknown token. `prompt` is put before every string that is one text (None:
    the one that the model's files put before every text, if any; "" for none).
    """

    lowercase: bool | None = None
    lowercase_text: bool = False
    special_tokens: bool = True
    word_special_tokens: bool = True
    pair_separator: str | None = None
    whole_words: bool = False
    prompt: str | None = None


AS_THE_FILES_SAY = TokenizerOptions()
