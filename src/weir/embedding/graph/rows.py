"""Which rows a graph computes: those of tokens alone, one text's after the other's, or a rectangle that is filled up to the longest text.

Where a token is computed by itself, in all but attention, texts of unlike lengths cost no more than like ones if their tokens lie one after the
other. It takes a few copies in each layer, which a CPU hardly notices; a GPU would have to wait until it is known how many tokens there are.
"""

from weir.embedding.graph.assembling import Assembly


class Rectangle:
    """Rows are [batch, length, size], padding among them."""

    def __init__(self, assembly: Assembly, ids: str) -> None:
        self._assembly = assembly
        self._length = assembly.add("Shape", ids, start=1, end=2)

    def pick(self, each: str) -> str:
        """Return what an input [batch, length] has for each row."""
        return each

    def places(self, table: str) -> str:
        """Return what a table has for each row's place in its text."""
        zero = self._assembly.constant([0], "int64")
        return self._assembly.add("Slice", table, zero, self._length, zero)

    def spread(self, rows: str) -> str:
        """Return rows as [batch, length, size]."""
        return rows


class Packed:
    """Rows are [tokens, size]. There must be at least one token."""

    def __init__(self, assembly: Assembly, ids: str, mask: str) -> None:
        self._assembly = assembly
        found = assembly.add("NonZero", mask)
        self._cells = assembly.add("Transpose", found, perm=[1, 0])
        self._columns = assembly.add("Gather", found, self._long(1))
        # Where in the rectangle there is no token, any will do: nobody looks at it.
        flat = assembly.add("Reshape", mask, self._long([-1]))
        number = assembly.add("Sub", assembly.add("CumSum", flat, self._long(0)), self._int(1))
        number = assembly.add("Max", number, self._int(0))
        self._numbers = assembly.add("Reshape", number, assembly.add("Shape", ids))
        self._parts: dict[int, list[str]] = {}

    def pick(self, each: str) -> str:
        """Return what an input [batch, length] has for each row."""
        return self._assembly.add("GatherND", each, self._cells)

    def places(self, table: str) -> str:
        """Return what a table has for each row's place in its text."""
        return self._assembly.add("Gather", table, self._columns)

    def first(self, rows: str) -> str:
        """Return the first row of each text: [batch, 1, size]."""
        zero, one = self._long([0]), self._long([1])
        return self._assembly.add("Gather", rows, self._assembly.add("Slice", self._numbers, zero, one, one))

    def spread(self, rows: str) -> str:
        """Return rows as [batch, length, size]; where there is no token stands that of another."""
        return self._assembly.add("Gather", rows, self._numbers)

    def split(self, rows: str, count: int, size: int) -> list[str]:
        """Return `count` parts of each row, each of `size` numbers, spread. Each is copied once."""
        parts = self._assembly.add("Reshape", rows, self._long([-1, size]))
        if count not in self._parts:
            begin = self._assembly.add("Mul", self._numbers, self._int(count))
            self._parts[count] = [self._assembly.add("Add", begin, self._int(part)) for part in range(count)]
        return [self._assembly.add("Gather", parts, place) for place in self._parts[count]]

    def pack(self, value: str) -> str:
        """Return [batch, length, size] as rows again."""
        return self._assembly.add("GatherND", value, self._cells)

    def _int(self, value: int) -> str:
        return self._assembly.constant(value, "int32")

    def _long(self, value: int | list[int]) -> str:
        return self._assembly.constant(value, "int64")
