"""A terminal of a fixed size that remembers every state it was in, for tests of what people see."""

import io
import re
from dataclasses import dataclass

from rich.cells import cell_len

_PARTS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\s\S])")


@dataclass(frozen=True)
class Cell:
    """What a column of a row shows; the second column of a wide sign is empty."""

    text: str = " "
    style: str = ""


class Screen(io.StringIO):
    """Interprets what is written; a sequence that it does not know is an error.

    `states` holds the rows after each write, with those that have left the screen at the top.
    """

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        super().__init__()
        self.columns, self.lines = columns, lines
        self.rows: list[list[Cell]] = [[]]
        self.row = self.column = 0
        self.style = ""
        self.is_hidden = False  # the cursor
        self.states: list[list[list[Cell]]] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for found in _PARTS.finditer(text):
            values, command, sign = found.groups()
            if sign is None:
                self._control(values, command)
            else:
                self._add(sign)
        self.states.append([[*row] for row in self.rows])
        return len(text)

    @property
    def text(self) -> str:
        return self.text_of(self.rows)

    @staticmethod
    def text_of(rows: list[list[Cell]]) -> str:
        return "\n".join("".join(cell.text for cell in row).rstrip() for row in rows)

    def _control(self, values: str, command: str) -> None:
        match command, values:
            case "m", _:
                self.style = "" if values in ("", "0") else values
            case "A", _:
                self.row = max(self.row - int(values), len(self.rows) - self.lines, 0)
            case "K", "2":
                self.rows[self.row].clear()
            case (("h" | "l"), "?25"):
                self.is_hidden = command == "l"
            case _:
                raise AssertionError(f"unknown: {values}{command}")

    def _add(self, sign: str) -> None:
        if sign == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.rows):
                self.rows.append([])
            return
        if sign == "\r":
            self.column = 0
            return
        assert sign.isprintable(), repr(sign)
        width = cell_len(sign)
        row = self.rows[self.row]
        row += [Cell()] * (self.column - len(row))
        if not width:
            before = row[self.column - 1]
            row[self.column - 1] = Cell(before.text + sign, before.style)
            return
        assert self.column + width < self.columns, "the last column is left free"
        row[self.column : self.column + width] = [Cell(sign, self.style), *[Cell("")] * (width - 1)]
        self.column += width
