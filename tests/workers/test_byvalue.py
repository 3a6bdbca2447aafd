import io
import pickle
from typing import Any

import msgspec
import pytest

from weir.workers.byvalue import Pickler


def remade(value: Any) -> Any:
    packed = io.BytesIO()
    Pickler(packed, lambda kind: kind.__module__ == __name__).dump(value)
    return pickle.loads(packed.getvalue())


class Plain(msgspec.Struct):
    number: int
    text: str = "none"
    numbers: list[int] = []


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", tag="strict", kw_only=True):
    first_number: int = 1
    second_number: int

    def total(self) -> int:
        return self.first_number + self.second_number

    @property
    def doubled(self) -> int:
        return 2 * self.total()

    @classmethod
    def of(cls, number: int) -> "Strict":
        return cls(second_number=number)


class Derived(Plain):
    more: Plain | None = None


@pytest.mark.parametrize("struct", [Plain, Strict, Derived])
def test_a_struct_is_another_one_with_the_same_fields_and_rules(struct: type[msgspec.Struct]) -> None:
    again = remade(struct)

    assert again is not struct
    assert (again.__name__, again.__qualname__, again.__module__) == (struct.__name__, struct.__qualname__, __name__)
    assert [field.name for field in msgspec.structs.fields(again)] == [
        field.name for field in msgspec.structs.fields(struct)
    ]
    assert msgspec.json.schema(again) == msgspec.json.schema(struct)


def test_defaults_are_kept_and_not_shared() -> None:
    again = remade(Plain)

    first, second = again(3), again(4, "text")
    first.numbers.append(1)

    assert (first.text, second.text, second.numbers) == ("none", "text", [])


def test_methods_and_options_are_kept() -> None:
    again = remade(Strict)

    value = msgspec.json.decode(b'{"type": "strict", "firstNumber": 2, "secondNumber": 3}', type=again)

    assert (value.total(), value.doubled, again.of(5).total()) == (5, 10, 6)
    with pytest.raises(AttributeError, match="immutable"):
        value.first_number = 3
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"type": "strict", "secondNumber": 3, "third": 3}', type=again)


def test_bases_are_remade_once() -> None:
    derived, plain = remade((Derived, Plain))

    assert issubclass(derived, plain)
    assert derived(1, more=plain(2)).more.number == 2


def test_what_can_be_imported_is_not_remade() -> None:
    assert remade(msgspec.structs.FieldInfo) is msgspec.structs.FieldInfo
