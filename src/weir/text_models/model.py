"""The model that workers run: texts or their tokens in, vectors out.

Texts are tokenized, texts of similar length are computed together, and shorter texts are padded.
"""

import copy
import zlib
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from struct import pack
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import InvalidRequest, ModelError
from weir.images import ImageLimits, Picture, read_base64
from weir.messages import JSON
from weir.model import Measure, Model
from weir.text_models import (
    ALONE,
    DEFAULT_COMPUTING,
    DEFAULT_TEXT,
    OF_SPECIAL_TOKENS,
    OF_TOKENS,
    WITH_CLASSIFIER,
    ComputingSettings,
    Pooling,
    TextSettings,
    WorkerShare,
)
from weir.text_models.late_interaction import QUERY, LateInteraction, maxsim
from weir.text_models.packing import written_numbers
from weir.text_models.recipe import ModelFiles, read_files
from weir.text_models.runtime import (
    AUTO,
    CPU,
    Inputs,
    Pixels,
    Widths,
    device_of,
    may_use_gpu,
    no_gpu,
    open_runtime,
    release_free_memory,
    wanted_device,
    widened,
)
from weir.text_models.texts import (
    IMAGE,
    EncodedImage,
    Ids,
    ImageItem,
    PlainText,
    TextItem,
    TextOutput,
    TokenRule,
    Tokens,
    Words,
)
from weir.wire.schema import any_of
from weir.wire.values import encode

if TYPE_CHECKING:
    from weir.text_models import Recipe
    from weir.text_models.runtime import Runtime
    from weir.text_models.tokenizer import Tokenizer


# Tokens of one run of the network. On a CPU larger runs gain nothing; on a GPU smaller ones are slower per text.
RUN_TOKENS_CPU, RUN_TOKENS_GPU = 512, 16384
BYTES_PER_TOKEN = 4  # of ordinary English
DEFAULT_IMAGES = ImageLimits()
_OWN = ""  # the output of a text that asks for none
_OUTPUTS = {Pooling.SPARSE: TextOutput.SPARSE, Pooling.TOKENS: TextOutput.TOKENS, Pooling.NONE: TextOutput.TOKENS}
_NO_OUTPUT = (*WITH_CLASSIFIER, Pooling.TOKEN_LOGITS, Pooling.YES_NO)


class TextEncoder(Model):
    """A sentence encoder from a directory in the layout of Hugging Face or sentence-transformers.

    An item is `Tokens` or a text: a string, a list of words, a list of token ids with special tokens, or a pair. A pair is a tuple of two strings in Python,
    and elsewhere an object with `text` and `pair`. An item of the content type application/octet-stream is token ids, int32 little-endian. A model of texts and
    images also takes a Picture. The output is a vector, or with the pooling `none` a list of vectors, one for each token.

    Args:
        directory: the model's directory.
        text: how the vector of a text is computed.
        computing: with what, and where.
        share: the worker's share of the machine.
        images: what an image may be, for a model that reads images.

    A table of names and values, as a command line or a file has them, may take the place of each of them. Raises SettingsError, here or when it is loaded, naming the file or the setting and the rule.
    """

    # Checked item by item in `preprocess_batch`, which says what is wrong in words.
    content_types: ClassVar[Sequence[str]] = (JSON,)
    Input: ClassVar[Any] = Annotated[Any, any_of(PlainText, Words, Ids, TextItem)]
    Output: ClassVar[Any] = Annotated[Any, any_of(list[float], list[list[float]])]
    plain_texts: ClassVar[bool] = True
    padded: ClassVar[bool | None] = True
    # Which towers of a model of texts and images are opened: that for texts, that for images (True).
    towers: ClassVar[Sequence[bool]] = (False, True)
    # Short texts, so that they fit where long texts are refused.
    examples: ClassVar[Sequence[Any]] = ("First do it", "then do it right", "then do it better")

    def __init__(
        self,
        directory: str | Path,
        text: TextSettings | Mapping[str, Any] = DEFAULT_TEXT,
        computing: ComputingSettings | Mapping[str, Any] = DEFAULT_COMPUTING,
        share: WorkerShare | Mapping[str, Any] = ALONE,
        images: ImageLimits | Mapping[str, Any] = DEFAULT_IMAGES,
    ) -> None:
        self.directory = Path(directory)
        self.text = TextSettings(**text) if isinstance(text, Mapping) else text
        self.computing = ComputingSettings(**computing) if isinstance(computing, Mapping) else computing
        self.share = WorkerShare(**share) if isinstance(share, Mapping) else share
        self.images = ImageLimits(**images) if isinstance(images, Mapping) else images
        self.run_tokens = self.computing.run_tokens or self.share.run_tokens
        self._files: ModelFiles
        self._recipe: Recipe
        self._hides_special: bool
        self._late: LateInteraction | None = None
        self._filling: int | None
        self._reader: ItemReader
        # Of the towers that are open, by whether it is that for images.
        self._runtimes: dict[bool, Runtime] = {}
        self._widths: dict[bool, Widths] = {}

    def load_shared(self) -> None:
        """Read the model's files and build its graph if the cache has none. Open the graph too if that starts no thread, as workers are forked."""
        self._files = files = read_files(self.directory, self.text, self.computing)
        checkpoint, tokenizer = files.checkpoint, files.tokenizer
        self._recipe = files.recipe
        self._hides_special = self.text.hide_special and not set(files.recipe.poolings) & set(OF_SPECIAL_TOKENS)
        self._pad_id = checkpoint.architecture.pad_id
        late, tokens = tokenizer.options.late, checkpoint.heads.tokens
        self._poolings = {_OWN: files.recipe.pooling, **poolings_of(files.recipe)}
        self._skipped = int(tokens is not None and tokens.skips_first)
        self._type_lead = tokenizer.type_lead
        self._unweighted_ids = np.array(sorted(tokenizer.unweighted_ids), np.int64)
        self._reader = ItemReader(
            tokenizer,
            TokenRule(files.max_length, self.text.truncate and not self.text.split),
            vocabulary=checkpoint.architecture.vocab_size,
            outputs=poolings_of(files.recipe),
            before=0 if late is None else max(late.query_length or files.max_length, late.expands_to),
        )
        self._late, self._filling = late, None
        if late is not None and tokenizer.late is not None:
            self._skipped_ids = np.array(sorted(tokenizer.late.skipped), np.int64)
            self._filling = None if late.attends else tokenizer.late.filling
        if self.share.threads == 1 and not self.computing.compile and not may_use_gpu(self.computing.device_map):
            self._open(CPU)

    def _open(self, device: str) -> None:
        """Open the towers that this class has, as far as the model has them."""
        checkpoint = self._files.checkpoint
        for images in self.towers if checkpoint.vision is not None else (False,):
            recipe = replace(self._recipe, images=images)
            self._runtimes[images] = open_runtime(checkpoint, recipe, self.computing, self.share, device)

    def load(self) -> None:
        """Open the model on this worker's device, if it is not open yet. Raises SettingsError if a GPU was asked for and cannot be used."""
        device, share = device_of(self.computing, self.worker_index), self.share
        if not self._runtimes:
            self._open(device)
        wanted = wanted_device(self.computing.device_map, self.worker_index)
        for images, runtime in self._runtimes.items():
            if runtime.device != device and wanted != AUTO:
                raise no_gpu(wanted, 0)
            if share.lone_threads > share.threads and runtime.device == CPU:
                widths = widened(runtime, share.threads, share.lone_threads)
                if widths is not None:
                    self._widths[images] = widths
            if self.run_tokens is None:
                self.run_tokens = RUN_TOKENS_CPU if runtime.device == CPU else RUN_TOKENS_GPU

    def preprocess_batch(self, items: list[Any]) -> list[Any]:
        """Return the TokenIds of each text, the numbers of each image as Preparation makes them, or an InvalidRequest in the place of an item."""
        images = [image_of(item) for item in items]
        texts = iter(self._reader.read([item for item, image in zip(items, images, strict=True) if image is None]))
        prepared = iter(self._all_prepared([image for image in images if image is not None]))
        return [next(texts) if image is None else next(prepared) for image in images]

    def _all_prepared(self, images: list[bytes]) -> list[NDArray[np.float32] | InvalidRequest]:
        threads = min(self.share.threads, len(images))
        if threads <= 1:
            return list(map(self._prepared, images))
        with ThreadPoolExecutor(threads) as pool:  # Pillow decodes and resizes without the interpreter's lock
            return list(pool.map(self._prepared, images))

    def _prepared(self, image: bytes) -> NDArray[np.float32] | InvalidRequest:
        vision = self._files.checkpoint.vision
        if vision is None or vision.preparation is None or True not in self.towers:
            return InvalidRequest("an image: the model reads only texts")
        try:
            limits = DEFAULT_IMAGES if image == SAMPLE else self.images  # the server's own keeps to no limit
            return vision.preparation.prepare(image, limits)
        except InvalidRequest as error:
            return error

    def predict(self, batch: "list[TokenIds | NDArray[np.float32]]") -> list[Any]:
        """Return the vector of each text and image, float32 [dimensions], or [tokens, dimensions] for the pooling `none`.

        Of a text that asks for outputs, see Tokens, it is a tuple with the result of each; one pass makes them all. Texts of similar length are computed
        together, so that there is little padding. Of a pair of late interaction it is the score [1]. A text for which the network computes
        numbers that are not finite gets a ModelError.
        """
        images = [each for each in batch if isinstance(each, np.ndarray)]
        texts = iter(self._of_texts([each for each in batch if isinstance(each, TokenIds)]))
        if not images:
            return list(texts)
        vectors = iter(self._of_images(images))
        return [next(vectors) if isinstance(each, np.ndarray) else next(texts) for each in batch]

    def _of_images(self, images: list[NDArray[np.float32]]) -> list[Any]:
        vision = self._files.checkpoint.vision
        assert vision is not None
        several = max((self.run_tokens or 1) // vision.image_tokens, 1)
        vectors: list[Any] = []
        for start in range(0, len(images), several):
            pixels = Pixels(np.stack(images[start : start + several]))
            if self._share > 1 and (widths := self._widths.get(True)) is not None:
                (found,) = widths.run(self._share * self.share.threads, pixels)
            else:
                (found,) = self._runtimes[True].run(pixels)
            vectors += [vector if np.isfinite(vector).all() else _not_finite("image") for vector in found]
        return vectors

    def _of_texts(self, batch: "list[TokenIds]") -> list[Any]:
        if self._late is None:
            return self._computed(batch)
        parts: dict[tuple[bytes, bool], TokenIds] = {}
        keys = [[(each.ids.tobytes(), each.second == QUERY) for each in parts_of(text)] for text in batch]
        for text, own in zip(batch, keys, strict=True):  # a query that is ranked with many documents is computed once
            parts.update(zip(own, parts_of(text), strict=True))
        results = dict(zip(parts, self._computed(list(parts.values())), strict=True))
        found = [[results[key] for key in own] for own in keys]
        return [self._late_result(each, mean=self._late.mean) for each in found]

    @staticmethod
    def _late_result(parts: list[Any], *, mean: bool) -> Any:
        """Return the vectors of a text, or the score of a query and a document; the error of a part is that of the whole."""
        failed = next((part for part in parts if isinstance(part, ModelError)), None)
        if failed is not None:
            return copy.copy(failed)  # each caller raises its own
        return parts[0] if len(parts) == 1 else maxsim(*parts, mean=mean)

    def _computed(self, batch: "list[TokenIds]") -> list[Any]:
        threads = self._share * self.share.threads
        widths = self._widths.get(False) if self._share > 1 else None
        outputs: list[Any] = [None] * len(batch)
        fixed = self._files.max_length if self.text.fixed_length else None
        lengths = [fixed or len(text.ids) for text in batch]
        for places in runs(lengths, self.run_tokens or 1, self.share.padding_cost):
            texts = [batch[index] for index in places]
            inputs = padded_inputs(
                texts,
                pad_id=self._pad_id,
                mask_special=self._recipe.mask_special,
                length=fixed,
                hide_special=self._hides_special,
                type_lead=self._type_lead,
                filling=self._filling,
            )
            wanted = list(dict.fromkeys(output for text in texts for output in text.outputs or (_OWN,)))
            if widths is not None and wanted == [_OWN]:
                results = widths.run(threads, inputs)
            else:
                results = self._runtimes[False].run(inputs, [self._poolings[output] for output in wanted])
            computed = dict(zip(wanted, results, strict=True))
            odd = _rows_not_finite(results, texts)
            for row, (index, text) in enumerate(zip(places, texts, strict=True)):
                if row in odd:
                    outputs[index] = _not_finite("text")
                    continue
                found = [
                    self._result(self._poolings[output], computed[output][row], text, inputs.pool[row])
                    for output in text.outputs or (_OWN,)
                ]
                outputs[index] = tuple(found) if text.outputs else found[0]
        return outputs

    def _result(self, pooling: Pooling, numbers: Any, text: "TokenIds", pool: Any) -> Any:
        """Return the result of a pooling for one text: its vector, its terms, or the vectors of its tokens."""
        if pooling is Pooling.SPARSE:
            return terms(numbers, text.ids, self._unweighted_ids)
        if pooling not in OF_TOKENS:
            return numbers
        count = len(text.ids)
        if pooling is Pooling.TOKENS and self._late is not None:
            own = numbers[:count]
            return own if text.second == QUERY else own[~np.isin(text.ids, self._skipped_ids)]
        if pooling is Pooling.NONE and pooling in self._recipe.further:  # computed without weights
            return numbers[:count] * pool[:count, None]
        return self._trim(numbers, count)[self._skipped if pooling is Pooling.TOKENS else 0 :]

    def _trim(self, vectors: Any, count: int) -> Any:
        """Return the vectors of a text's `count` tokens: without those of padding, or with a fixed length with zeros for them."""
        if not self.text.fixed_length:
            return vectors[:count]
        vectors[count:] = 0
        return vectors

    def encode(self, value: Any, content_type: str = JSON) -> bytes:
        """Return a response as JSON; of vectors each number has the fewest digits, see packing.packed."""
        if isinstance(value, np.ndarray):
            return written_numbers(np.ascontiguousarray(value, np.float32))
        return encode(value, JSON)

    @classmethod
    def measure(cls, item: Any) -> Measure:
        """Return the number of tokens of an item as its cost: exact for tokens, else estimated from its size."""
        return Measure(cost=float(estimated_tokens(item)))


class TextTower(TextEncoder):
    """A sentence encoder: the tower for texts of a model of texts and images. Images have a queue, service times and a policy of their own."""

    towers: ClassVar[Sequence[bool]] = (False,)
    # A request for the model may have images, too; they are computed by the tower for images.
    Input: ClassVar[Any] = Annotated[Any, any_of(PlainText, Words, Ids, TextItem, ImageItem)]


def _sample() -> bytes:
    """Return a grey PNG of 640 × 480 pixels. (RFC 2083, sections 3 and 4.1)"""
    chunks = {
        b"IHDR": pack(">IIBBBBB", 640, 480, 8, 0, 0, 0, 0),
        b"IDAT": zlib.compress((b"\0" + bytes(column % 256 for column in range(640))) * 480),
        b"IEND": b"",
    }
    written = (
        pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data)) for kind, data in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


# After so many bytes of image files a worker returns free memory to the system, which takes milliseconds; so many seconds later, as the files are held meanwhile.
MANY_BYTES, RELEASE_AFTER = 32 << 20, 1.0
SAMPLE = _sample()  # what an ImageTower is warmed up and measured with


class ImageTower(TextEncoder):
    """The tower for images of a model of texts and images.

    An item is an EncodedImage or a Picture, or an object whose `image` is an image file in base64. A batch has no padding: what it costs beyond the tokens is
    decoding.
    """

    Input: ClassVar[Any] = Annotated[Any, any_of(dict[str, str])]
    Output: ClassVar[Any] = list[float]
    plain_texts: ClassVar[bool] = False
    # Padding would cost nothing, as there is none. Requests take turns by their callers where batches are padded, and wait as they came elsewhere.
    padded: ClassVar[bool | None] = True
    max_padding: ClassVar[float | None] = 0.0
    padding_cost: ClassVar[float | None] = 0.0
    towers: ClassVar[Sequence[bool]] = (True,)
    examples: ClassVar[Sequence[Any]] = ({IMAGE: b64encode(SAMPLE).decode()},)
    warmup_sizes: ClassVar[Sequence[int] | None] = (1, 4)
    _received = 0  # bytes of files, since free memory was returned to the system

    def preprocess_batch(self, items: list[Any]) -> list[Any]:
        """Return the numbers of each image as Preparation makes them, or an InvalidRequest in the place of an item."""
        found = [self._image(item) for item in items]
        files = [each for each in found if isinstance(each, bytes)]
        self._received += sum(map(len, files))
        prepared = iter(self._all_prepared(files))
        return [next(prepared) if isinstance(each, bytes) else each for each in found]

    def predict(self, batch: list[Any]) -> list[Any]:
        """Return the vector of each image, float32 [dimensions]."""
        vectors = super().predict(batch)
        if self._received > MANY_BYTES:
            self._received = 0
            timer = Timer(RELEASE_AFTER, release_free_memory)
            timer.daemon = True
            timer.start()
        return vectors

    def _image(self, item: Any) -> bytes | InvalidRequest:
        if not isinstance(item, dict) or not isinstance(item.get(IMAGE), str):
            return image_of(item) or InvalidRequest(
                f"an item of type {type(item).__name__}: must be an object whose {IMAGE!r} is an image file in base64"
            )
        try:
            return read_base64(item[IMAGE], self.images)
        except InvalidRequest as error:
            return error

    @classmethod
    def measure(cls, item: Any) -> Measure:
        """Return that an item is one of a batch: only an encoder knows what an image costs, see EncodedImage."""
        return Measure()


def _not_finite(kind: str) -> ModelError:
    rule = "must be finite: a wider dtype may help"
    return ModelError(f"the model computed NaN or infinite numbers for this {kind}, {rule}")


def image_of(item: Any) -> bytes | None:
    """Return the encoded image that an item is, as a Picture, or an EncodedImage or its plain form; None for a text."""
    if isinstance(item, (Picture, EncodedImage)):
        return item.data
    if isinstance(item, tuple) and len(item) == 2 and item[0] == IMAGE and not isinstance(item[1], str):
        return bytes(item[1])
    return None


def _rows_not_finite(results: Sequence[NDArray[Any]], texts: "Sequence[TokenIds]") -> set[int]:
    """Return the rows of the texts for which the network has computed NaN or infinite numbers. Those of padding do not count.

    This is the one check, of vectors, terms, scores and labels alike: no caller gets such a number, and a model whose examples have some does not start.
    """
    return {
        row
        for result in results
        if not np.isfinite(result).all()
        for row, text in enumerate(texts)
        if not np.isfinite(result[row] if result.ndim < 3 else result[row][: len(text.ids)]).all()
    }


def estimated_tokens(item: Any) -> int:
    """Return how many tokens `item` has, at least 1: exact for tokens, token ids and encoded images, an estimate for texts."""
    if isinstance(item, EncodedImage):
        return item.tokens
    if isinstance(item, Tokens):
        return max(len(item.ids) // 4, 1)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return max(len(item) // 4, 1)
    if isinstance(item, str):
        return 3 + len(item) // BYTES_PER_TOKEN
    if isinstance(item, dict):
        return sum(map(estimated_tokens, item.values())) or 1
    if isinstance(item, (list, tuple)):
        return sum(3 + len(part) // BYTES_PER_TOKEN if isinstance(part, str) else 1 for part in item) or 1
    return 1


def terms(weights: NDArray[Any], ids: NDArray[Any], unweighted_ids: NDArray[Any]) -> NDArray[np.float32]:
    """Return the terms of a text, float32 [terms, 2]: the id of a word and its weight, in order of the ids. float32 has each id exactly, up to 2**24.

    `weights` are those of all words of the vocabulary [words], or those of each token [tokens, 1]; of a token that occurs several times the largest counts,
    and `unweighted_ids` do not count (see Tokenizer), as in FlagEmbedding.
    """
    if weights.ndim == 1:
        (found,) = np.nonzero(weights > 0)
        return np.stack([found, weights[found]], axis=1).astype(np.float32)
    each = weights[: len(ids), 0]
    counts = (each > 0) & ~np.isin(ids, unweighted_ids)
    found, places = np.unique(ids[counts], return_inverse=True)
    largest = np.zeros(len(found), np.float32)
    np.maximum.at(largest, places, each[counts])
    return np.stack([found, largest], axis=1).astype(np.float32)


class TokenIds(NamedTuple):
    """The token ids of one text, int32 [tokens], and the index at which the second text of a pair begins, 0 for a single text."""

    ids: NDArray[Any]
    second: int
    outputs: tuple[str, ...] = ()  # see Tokens


def poolings_of(recipe: "Recipe") -> dict[str, Pooling]:
    """Return the poolings that make the outputs which a text may ask for by name, that of the recipe first; none if a text has labels or a score."""
    found = ((_OUTPUTS.get(pooling, TextOutput.DENSE), pooling) for pooling in (recipe.pooling, *recipe.further))
    return {} if recipe.pooling in _NO_OUTPUT else {output.value: pooling for output, pooling in found}


def parts_of(text: TokenIds) -> list[TokenIds]:
    """Return the query and the document of a pair of late interaction; of a single text that text."""
    if text.second <= 0:
        return [text]
    return [TokenIds(text.ids[: text.second], QUERY), TokenIds(text.ids[text.second :], 0)]


def runs(lengths: Sequence[int], run_tokens: int, padding_cost: float = 1.0) -> Iterator[list[int]]:
    """Divide texts of these lengths, in tokens, into runs of the network. Yield the indices of the texts of each run, the shortest texts first.

    The texts of a run are padded to its longest. A run has at most `run_tokens` tokens, where a token of padding counts `padding_cost`. A longer text is a
    run of its own.
    """
    run: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest = lengths[index]
        tokens += longest
        if run and tokens + padding_cost * (longest * (len(run) + 1) - tokens) > run_tokens:
            yield run
            run, tokens = [], longest
        run.append(index)
    if run:
        yield run


def padded_inputs(
    texts: Sequence[TokenIds],
    *,
    pad_id: int,
    mask_special: bool,
    length: int | None = None,
    hide_special: bool = False,
    type_lead: int | None = 0,
    filling: int | None = None,
) -> Inputs:
    """Return the arrays of one run, padded with `pad_id` to its longest text, or to `length` tokens.

    With `mask_special` the first and the last token of a text have the weight 0 in the pooling, unless the text has no other token. With
    `hide_special` these tokens, and the one before the second text of a pair, are also masked in attention; positions do not change. The second
    text of a pair has the type 1, with `type_lead` tokens before it; None: all tokens have the type 0.
    To the tokens `filling` at the end of a query of late interaction no token attends.
    """
    shape = len(texts), length or max(len(text.ids) for text in texts)
    ids = np.full(shape, pad_id, np.int32)
    mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    pool = np.zeros(shape, np.float32)
    for row, (tokens, second, _) in enumerate(texts):
        count = len(tokens)
        ids[row, :count] = tokens
        mask[row, :count] = 1
        if second == QUERY:
            others = np.flatnonzero(tokens != filling)
            mask[row, others[-1] + 1 if len(others) else 0 : count] = 0
        elif second and type_lead is not None:
            types[row, second - type_lead : count] = 1
        inner = slice(1, count - 1) if mask_special and count > 2 else slice(0, count)
        pool[row, inner] = 1
        if hide_special and count > 2:
            mask[row, [0, count - 1, *([second - 1] if second > 0 else [])]] = 0
            pool[row] *= mask[row]
    return Inputs(ids, mask, types, pool)


ITEM_RULE = "must be a text, a list of words or of token ids, or an object with `text` and perhaps `pair`"


class ItemReader(NamedTuple):
    """Turns items into token ids, texts by the `rule`. Token ids must be below `vocabulary`.

    `outputs` are the names of what a text may ask for. Of a pair of late interaction the query has at most `before` tokens.
    """

    tokenizer: "Tokenizer"
    rule: TokenRule
    vocabulary: int
    outputs: Collection[str] = ()
    before: int = 0

    def read(self, items: Sequence[Any]) -> list[TokenIds | InvalidRequest]:
        """Return the token ids of each item, or the error in its place. Texts are tokenized in one call."""
        results: list[Any] = [_text(item) if (ids := self._tokens(item)) is None else ids for item in items]
        texts = [index for index, each in enumerate(results) if not isinstance(each, (TokenIds, InvalidRequest))]
        if texts:
            for index, found in zip(texts, self._tokenized([results[each] for each in texts]), strict=True):
                results[index] = found
        return results

    def _tokens(self, item: Any) -> TokenIds | InvalidRequest | None:
        """Return the token ids of an item that is bytes, alone or with the index of the second text, or its error; None for another item."""
        tokens = Tokens(*item) if isinstance(item, tuple) and item and isinstance(item[0], bytes) else Tokens(item)
        return self._checked(tokens) if isinstance(tokens.ids, bytes) else None

    def _tokenized(self, texts: list[Any]) -> "list[TokenIds | InvalidRequest]":
        found = self.tokenizer.encode(texts, self.rule)
        return [
            each if isinstance(each, InvalidRequest) else TokenIds(np.frombuffer(each.ids, "<i4"), each.second)
            for each in found
        ]

    def _checked(self, tokens: Tokens) -> TokenIds | InvalidRequest:
        if not tokens.ids or len(tokens.ids) % 4:
            return InvalidRequest(
                f"token ids of {len(tokens.ids)} bytes: must be one or more, each an int32 of 4 bytes"
            )
        ids = np.frombuffer(tokens.ids, "<i4")
        if len(ids) > self.rule.max_length + (self.before if tokens.second else 0):
            return InvalidRequest(f"{len(ids)} token ids: must be at most {self.rule.max_length}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            return InvalidRequest(f"token ids from {ids.min()} to {ids.max()}: must be 0 to {self.vocabulary - 1}")
        unknown = [name for name in tokens.outputs if name not in self.outputs]
        if unknown:
            return InvalidRequest(f"output {unknown[0]!r}: the model makes {', '.join(self.outputs) or 'none by name'}")
        return TokenIds(ids, tokens.second, tokens.outputs)


def _text(item: Any) -> Any:
    """Return the item as a Text, or an error."""
    if isinstance(item, dict):
        if not {"text"} <= item.keys() <= {"text", "pair"} or not all(isinstance(part, str) for part in item.values()):
            return InvalidRequest(f"an object with {sorted(map(str, item))}: {ITEM_RULE}, all strings")
        return (item["text"], item["pair"]) if "pair" in item else item["text"]
    if isinstance(item, (str, list, tuple)):
        return item
    return InvalidRequest(f"an item of type {type(item).__name__}: {ITEM_RULE}")
