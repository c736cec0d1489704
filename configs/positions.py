"""On which line of a TOML file each key stands.

The standard parser drops positions, so a file with problems is walked once more. It has been parsed
by then: the walk may take valid TOML for granted and only needs to know where keys and values end.
"""

from __future__ import annotations

import tomllib

Key = tuple[str, ...]

_BLANK = " \t\r\n"
_BARE_END = " \t.=]"


def key_lines(text: str) -> dict[Key, int]:
    """Line (from 1) of the first mention of every table and key.

    Args:
        text: a valid TOML document.

    Returns:
        Absolute keys, such as ``("core", "lr")``. A dotted key or header also gives its prefixes
        the line, unless they have one; keys of inline tables count, elements of arrays do not.
    """
    return _Walk(text).run()


class _Walk:
    def __init__(self, text: str) -> None:
        # A parser may see "\r\n" as it is; lines count by "\n" either way.
        self.text = text
        self.at = 0
        self.lines: dict[Key, int] = {}

    def run(self) -> dict[Key, int]:
        table: Key = ()
        while self._skip_blank():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.lines

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_blank(self) -> bool:
        """Go to the next key, bracket or brace; False at the end."""
        while char := self._peek():
            if char == "#":
                self._to_line_end()
            elif char in _BLANK:
                self.at += 1
            else:
                return True
        return False

    def _to_line_end(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _header(self) -> Key:
        line = self._line()
        self.at += len("[[") if self.text.startswith("[[", self.at) else len("[")
        key = self._key()
        self._note((), key, line)
        self._to_line_end()
        return key

    def _pair(self, table: Key) -> None:
        line = self._line()
        key = self._key()
        self._note(table, key, line)
        self.at = self.text.index("=", self.at) + 1
        while self._peek() in (" ", "\t"):
            self.at += 1
        self._value((*table, *key))

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _note(self, table: Key, key: Key, line: int) -> None:
        for end in range(1, len(key) + 1):
            self.lines.setdefault((*table, *key[:end]), line)

    def _key(self) -> Key:
        parts: list[str] = []
        while True:
            while self._peek() in (" ", "\t"):
                self.at += 1
            start = self.at
            if self._peek() in ('"', "'"):
                self._string()
                parts.append(tomllib.loads(f"k = {self.text[start : self.at]}")["k"])
            else:
                while self._peek() not in _BARE_END:
                    self.at += 1
                parts.append(self.text[start : self.at])
            while self._peek() in (" ", "\t"):
                self.at += 1
            if self._peek() != ".":
                return tuple(parts)
            self.at += 1

    def _value(self, key: Key) -> None:
        char = self._peek()
        if char == "{":
            self._inline_table(key)
        elif char == "[":
            self._array()
        elif char in ('"', "'"):
            self._string()
        else:
            while self._peek() and self._peek() not in ",]}#\n":
                self.at += 1

    def _inline_table(self, key: Key) -> None:
        self.at += 1
        while self._skip_blank():
            char = self._peek()
            if char == "}":
                self.at += 1
                return
            if char == ",":
                self.at += 1
            else:
                self._pair(key)

    def _array(self) -> None:
        depth = 0
        while self._skip_blank():
            char = self._peek()
            if char in ('"', "'"):
                self._string()
                continue
            self.at += 1
            depth += (char in "[{") - (char in "]}")
            if depth == 0:
                return

    def _string(self) -> None:
        quote = self._peek()
        if self.text.startswith(quote * 3, self.at):
            self._long_string(quote * 3)
            return
        self.at += 1
        while self._peek() != quote:
            self.at += 2 if quote == '"' and self._peek() == "\\" else 1
        self.at += 1

    def _long_string(self, fence: str) -> None:
        self.at += 3
        while not self.text.startswith(fence, self.at):
            self.at += 2 if fence == '"""' and self._peek() == "\\" else 1
        self.at += 3
        # Up to two more quotes belong to the text itself.
        while self._peek() == fence[0]:
            self.at += 1
