"""Pictures in requests: their forms in JSON, uploads of files, and URLs from which they are fetched."""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from weir.errors import DeadlineExceeded, InvalidRequest, WeirError, brief
from weir.images import ImageLimits, Picture, check_type, read_base64
from weir.images.fetching import SCHEMES
from weir.text_models.texts import PlainText, Text
from weir.text_server.requests import stated_limit
from weir.text_server.texts import TEXTS_FIELD
from weir.wire.forms import MULTIPART, read_form
from weir.wire.schema import any_of


class PictureUrl(NamedTuple):
    """A picture that is still to be fetched."""

    url: str


Asked = Text | PictureUrl
_PICTURES = frozenset((Picture, PictureUrl))


class ImageUrl(Struct):
    """The URL of a picture, which may be a data: URL with the picture itself."""

    url: str


class TextPart(Struct):
    """A text, as the content of a message has it."""

    text: PlainText
    type: Literal["text"] = "text"


class ImagePart(Struct):
    """A picture in base64, as a data: URL, or by its URL."""

    image: str


class ImageUrlPart(Struct):
    """A picture, as the content of a message has it."""

    image_url: Annotated[Any, any_of(str, ImageUrl)]
    type: Literal["image_url"] = "image_url"


# A text or a picture, as OpenAPI describes it.
Part = Annotated[Any, any_of(PlainText, TextPart, ImagePart, ImageUrlPart)]


class Message(Struct):
    """A message, whose content is a text or parts."""

    content: Annotated[Any, any_of(PlainText, list[Part])]
    role: str = "user"


def has_pictures(texts: Sequence[Asked]) -> bool:
    """Return whether one of `texts` is a picture, or the URL of one."""
    return not _PICTURES.isdisjoint(map(type, texts))


def read_image(value: Any, where: str, limits: ImageLimits) -> Picture | PictureUrl:
    """Return the picture that `value` is: a file of an upload, bytes of msgpack, base64, a data: URL, or a URL; alone, or as OpenAI's object with `url`.

    Raises InvalidRequest naming `where` and the rule, also for a URL if `limits` allow none.
    """
    if isinstance(value, Picture):
        return value
    source = value.get("url") if isinstance(value, dict) else value
    if isinstance(source, bytes):
        return Picture(source)
    if not isinstance(source, str):
        raise InvalidRequest(f"{where}: must be an image in base64, or its URL, is {brief(value)}")
    if not source[:8].lower().startswith(SCHEMES):
        try:
            return Picture(read_base64(source, limits))
        except InvalidRequest as error:
            raise error.of(where) from None
    if not limits.allow_url:
        rule = "no URL is fetched here: send the image as a data: URL, or have the server started with --allow-url HOST"
        raise InvalidRequest(f"{where}={brief(source)}: {rule}")
    return PictureUrl(source)


# Uploads.

UPLOADS = ("image/*", MULTIPART)
_IMAGE = "image/"
_MORE_FIELDS = 16  # of a form, in addition to its pictures and texts
_BMP_HEAD = 54  # bytes


def is_upload(content_type: str) -> bool:
    """Return whether a body of this content type is a picture, or a form that may have some."""
    return content_type.lower().startswith((_IMAGE, UPLOADS[1]))


def read_upload(content_type: str, body: bytes, field: str, most: int) -> dict[str, Any]:
    """Return the document that an upload stands for. Its list `field` has the files, which are pictures, and the texts of parts with that name, in order; at
    most `most`. Each other part is a field. Raises InvalidRequest."""
    if content_type.lower().startswith(_IMAGE):
        return {field: [_typed(body, content_type, field, 0)]}
    items: list[Picture | str] = []
    document: dict[str, Any] = {field: items}
    for part in read_form(content_type, body, most + _MORE_FIELDS):
        if part.content_type is not None:
            items.append(_typed(part.data, part.content_type, field, len(items)))
        elif part.name == field:
            items.append(_text_in(part.data, part.name))
        else:
            document[part.name] = _text_in(part.data, part.name)
    return document


def _typed(data: bytes, stated: str, field: str, index: int) -> Picture:
    """Return the picture of a file whose sender has `stated` its media type. Raises InvalidRequest naming its index in `field`."""
    try:
        check_type(stated)
    except InvalidRequest as error:
        raise error.at(field, index) from None
    return Picture(data)


def _text_in(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("must be a text in UTF-8; the part of a picture has a file name").of(brief(name)) from None


def as_bmp(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels [height, width, 3], red, green and blue, as a file in BMP, which takes no longer to write than to copy."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)  # a row ends at a multiple of four bytes
    rows[:, : 3 * width] = pixels[::-1, :, ::-1].reshape(height, -1)
    sizes = _BMP_HEAD + rows.size, _BMP_HEAD, _BMP_HEAD - 14, width, height
    return struct.pack("<2sI4xIIiiHH4xI16x", b"BM", *sizes, 1, 24, rows.size) + rows.tobytes()


# URLs.

_AT_ONCE = 8  # pictures of one request that are fetched at the same time
_FETCHING = 60.0  # seconds for those of a request that states no timeout


async def fetched(
    texts: Sequence[Asked | WeirError],
    fetch: Callable[[str], Awaitable[bytes]],
    timeout: float | None,
    *,
    each: bool = False,
) -> Sequence[Text | WeirError]:
    """Return `texts` with the pictures that `fetch` returns for their URLs, each fetched once, within `timeout` seconds.

    Raises what `fetch` raises, InvalidRequest with the index of the text; with `each` that takes the index of the picture. Raises DeadlineExceeded."""
    urls: dict[PictureUrl, int] = {}
    for index, text in enumerate(texts):
        if isinstance(text, PictureUrl):
            urls.setdefault(text, index)
    found: dict[PictureUrl, Picture | WeirError] = {}
    left = iter(urls.items())

    async def fetch_next() -> None:
        for picture, index in left:
            try:
                found[picture] = Picture(await fetch(picture.url))
            except InvalidRequest as error:
                found[picture] = error
                if not each:
                    raise error.at(TEXTS_FIELD, index) from None

    tasks = [asyncio.create_task(fetch_next()) for _ in range(min(_AT_ONCE, len(urls)))]
    try:
        async with asyncio.timeout(_FETCHING if timeout is None else timeout):
            await asyncio.gather(*tasks)
    except TimeoutError:
        limit = f"{_FETCHING:g} s" if timeout is None else stated_limit(timeout)
        raise DeadlineExceeded(f"{limit}: the deadline passed before all images were fetched") from None
    finally:
        for task in tasks:
            task.cancel()
    return [found[text] if isinstance(text, PictureUrl) else text for text in texts]
