"""A Markdown page in blocks, each with the comments that say where its numbers come from (see `figures`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_COMMENT = re.compile(r"^<!--.*?-->$", re.M | re.S)
_FILE = re.compile(r"[\w.-]+\.json|\{[^}]*@\}")


@dataclass(frozen=True)
class Term:
    """One term of a comment: the column that it is for ("" for all), its file and its place."""

    column: str
    file: str
    place: str


@dataclass
class Block:
    """Lines of Markdown between blank lines, with the comments before them.

    Attributes:
        line: number of the first line, from 1.
    """

    line: int
    lines: list[str] = field(default_factory=list)
    results: list[Term] = field(default_factory=list)
    exempt: list[str] = field(default_factory=list)

    @property
    def governed(self) -> bool:
        return bool(self.results)

    @property
    def is_table(self) -> bool:
        return self.lines[0].lstrip().startswith("|")


def blocks(text: str) -> Iterator[Block]:
    """Paragraphs, lists, tables and headings of a page; code is left out."""
    block: Block | None = None
    waiting: list[tuple[str, str]] = []
    defined: dict[str, str] = {}
    fenced = False
    for number, line in enumerate(_COMMENT.sub(_on_one_line, text).splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if definition := re.fullmatch(r"<!-- define (\w+): (.*) -->", line):
            defined[definition.group(1)] = definition.group(2)
            continue
        if comment := re.fullmatch(r"<!-- (results|not measured): (.*) -->", line):
            waiting.append((comment.group(1), comment.group(2)))
            continue
        code = fenced or (block is None and line.startswith("    "))
        if code or not line.strip():
            if block is not None:
                yield block
            block = None
            continue
        if block is None:
            block = Block(number)
            for kind, what in waiting:
                if kind == "results":
                    block.results += _terms(what, defined)
                else:
                    block.exempt.append(what)
            waiting = []
        block.lines.append(line)
    if block is not None:
        yield block
    if waiting:
        yield Block(0, ["(end of page)"], [Term("", "", what) for _, what in waiting])


def _on_one_line(comment: re.Match[str]) -> str:
    """A comment of several lines on its first, with as many lines behind it as before."""
    return " ".join(comment.group().split()) + "\n" * comment.group().count("\n")


def _terms(wanted: str, defined: dict[str, str], file: str = "") -> list[Term]:
    """Terms of a comment, each with the file that was named last, what was defined put in."""
    found: list[Term] = []
    for term in filter(None, map(str.strip, wanted.split(";"))):
        column, colon, place = term.partition(": ")
        if not colon:
            column, place = "", term
        if named := _FILE.search(place):
            file = named.group()
            place = _FILE.sub("", place).strip()
        if place.startswith("@") and place[1:] in defined:
            found += _terms(defined[place[1:]], defined, file)
        else:
            found.append(Term(column, file, place))
    # A file alone, before terms for columns, only says where these look.
    by_column = any(term.column for term in found)
    return [term for term in found if term.place or not by_column]
