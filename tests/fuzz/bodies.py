"""Bodies, made at random of one thing many times over: values, keys, nesting, escapes, fields, members. The storm sends them.

A search among them has found that msgspec reads some floats a thousand times more slowly than others.
"""

from random import Random

from weir.wire import kserve_grpc

ATOMS = (
    b"1", b"-1e308", b"4.9e-324", b"1e400", b"123456789012345678901234567890", b"0.1", b"null", b"true", b'""', b'"a"',
    rb'"\ud800"', rb'"\u0000"', b'"\xc3\xa9"', b"[]", b"{}", b"[1]", b'[""]', b'{"a":1}', b'{"":""}', b"[[]]", b"NaN",
)  # fmt: skip
PIECES = (b"a", rb"\n", rb"\u00e9", rb"\ud83d\ude00", rb"\ud83d", b"\xc3\xa9", rb"\\", b"&", b"%41", b"=")
KEYS = (
    b"inputs", b"outputs", b"parameters", b"x", b"s", b"texts", b"input", b"id", b"model", b"model_name", b"data", b"shape",
    b"datatype", b"name", b"cancel", b"prompt", b"is_tokenized", b"pairs", b"dimensions", b"user", b"query", b"documents", b"ids",
)  # fmt: skip
UNITS = (
    b"\x90", b"\x91\x90", b"\x01", b"\xc0", b"\xa0", b"\x80", b"\x81\xa0\xc0", b"\xc4\x00", b"\xd4\x00\x00",
    b"\xd7\xff" + bytes(8), b"\xcb" + bytes(8), b"\x92\x01\x01",
)  # fmt: skip


def repeated(unit: bytes, size: int) -> bytes:
    """Return so many units that they have about `size` bytes, with commas between."""
    return b",".join([unit] * max(1, size // (len(unit) + 1)))


def json_value(chance: Random, size: int, depth: int = 0) -> bytes:
    """Return a value of about so many bytes."""
    if size < 20 or depth > 4:
        return chance.choice(ATOMS)
    kind = chance.randrange(6)
    if kind == 0:
        unit = json_value(chance, chance.choice((10, 40, 200)), depth + 2)
        return b"[%b]" % repeated(unit, size)
    if kind == 1:
        levels = chance.choice((size // 2, min(size // 2, 500)))
        return b"[" * levels + chance.choice(ATOMS) + b"]" * levels
    if kind == 2:
        return b"{%b}" % b",".join(b'"%x":%b' % (place, chance.choice(ATOMS)) for place in range(size // 12))
    if kind == 3:
        return b'"%b"' % (chance.choice(PIECES) * (size // 4))
    if kind == 4:
        keys = chance.sample(KEYS, chance.randrange(1, 6))
        inner = [b'"%b":%b' % (key, json_value(chance, size // len(keys), depth + 1)) for key in keys]
        return b"{%b}" % b",".join(inner)
    return chance.choice((b"1", b"0", b"9")) * size


def json_body(chance: Random, size: int) -> bytes:
    """Return a body of JSON: a request of the Open Inference Protocol, one with a single field, or anything."""
    kind = chance.randrange(3)
    if kind == 0:
        shape = chance.choice((b"[1,%d]" % (size // 2), b"[%d,1]" % (size // 4), json_value(chance, size // 9)))
        return b'{"model_name":"m","inputs":[{"name":"x","datatype":"%b","shape":%b,"data":%b}],"outputs":%b}' % (
            chance.choice((b"FP32", b"BYTES", b"INT8", b"UINT64", b"BOOL", b"X" * (size // 3))), shape, json_value(chance, size),
            chance.choice((b"null", b"[%b]" % repeated(b'{"name":"a"}', size // 9))),
        )  # fmt: skip
    value = json_value(chance, size)
    return b'{"%b":%b}' % (chance.choice((b"texts", b"input", b"x", b"s")), value) if kind == 1 else value


def msgpack_body(chance: Random, size: int) -> bytes:
    """Return a list of one thing, perhaps in a field, or nested."""
    unit = chance.choice(UNITS)
    count = size // len(unit)
    body = b"\xdd" + count.to_bytes(4, "big") + unit * count
    return chance.choice((body, b"\x81\xa1x" + body, b"\x81\xa5texts" + body, unit * count, b"\x91" * size))


def grpc_body(chance: Random, size: int) -> bytes:
    """Return a message with one field many times over."""
    field = bytes([chance.choice((5, 6, 7, 4, 10, 15)) << 3 | 2, 0])
    plain = (field * (size // 2), b"\x7b\x7c" * (size // 2), b"\x7b" * size, b"\x2a\x80\x80\x80\x80\x00" * (size // 6))
    one = chance.randrange(3)
    if one == 0:
        return chance.choice(plain)
    request = kserve_grpc.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="x", datatype=chance.choice(("BYTES", "FP32", "INT8", "UINT64")), shape=[1, size])
    if one == 1:
        tensor.contents.bytes_contents.extend([b""] * (size // 4))
        tensor.contents.int64_contents.extend([1] * (size // 4))
    else:
        for place in range(size // 20):
            (request if place % 2 else tensor).parameters[f"{place}"].string_param = "x"
    body: bytes = request.SerializeToString()
    return body


def head(chance: Random, size: int) -> bytes:
    """Return a head of a request, or what may stand in one of its fields."""
    size, begin = min(size, 60_000), b"POST / HTTP/1.1\r\nHost: t\r\n"
    return chance.choice(
        (
            begin + b"a:\r\n" * (size // 4), begin + b"x: " + b" " * size, b"POST /" + b"%41" * (size // 3) + b" HTTP/1.1",
            b"\r\n" * (size // 2), begin + b"Content-Length: " + b"1" * size, b"a/b;q=0.1," * (size // 10), b";" * size,
            b"," * size, b'"' * size, b'a/b;x="' + b'\\"' * (size // 2), b"a/b;q=" + b"0" * size,
        )
    )  # fmt: skip
