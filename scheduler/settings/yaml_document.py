"""A YAML text as nested values with the line of each, and everything in it that a configuration does not take.

Duplicate names at any depth, aliases, tags and unclear scalars are collected, not raised, so that one look finds
them all; only a text that is no YAML at all ends it. The file knows YAML and no option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from trilane.errors import Problem
from trilane.settings.config_problems import Location, path_text, shown
from trilane.settings.yaml_scalars import Unclear, read_scalar

MAX_DEPTH = 16  # of brackets and indents; an option needs three
_PREFIX = "tag:yaml.org,2002:"
_ALIAS = "alias"
_TAGGED = "tagged"
_WRONG = object()  # stands for a value about which a problem was noted


@dataclass(frozen=True)
class Document:
    """What a YAML text holds.

    Attributes
    ----------
    value : object
        Nested dicts, lists, texts, numbers, booleans and None, without what the problems are about.
    lines : dict of str to int
        The line (from 1) of each value, by its path (``cache.slots``, ``policy.lanes.1``).
    problems : tuple of Problem
        What is wrong with the text itself, with ``where`` as NAME:LINE.
    """

    value: Any
    lines: dict[str, int]
    problems: tuple[Problem, ...]


def read_document(text: str, name: str, root: Location = (), numbered: bool = True) -> Document:
    """Read a text of one YAML document.

    Parameters
    ----------
    text : str
    name : str
        Where it comes from, as messages name it.
    root : tuple
        The path that the whole text is the value of.
    numbered : bool
        Whether messages name the line.
    """
    reader = _Reader(name, numbered)
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        reader.note_syntax(error, text, root)
        return Document(None, {}, tuple(reader.problems))
    value = None if node is None else reader.read(node, root)
    return Document(None if value is _WRONG else value, reader.lines, tuple(reader.problems))


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    except (ValueError, OverflowError):  # PyYAML does not check the numbers of "\\UFFFFFFFF" and of %YAML 1.999...
        problem = "found an escape or a version with a number out of range"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=loader.get_mark()) from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Composes nodes; bounds the depth, and leaves aliases and tags as nodes of their own."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            self.get_event()
            return yaml.ScalarNode(_ALIAS, f"*{event.anchor}", mark, mark)
        if self._depth == MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"is nested more than {MAX_DEPTH} deep", problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and getattr(event, "tag", None) not in (None, "!", f"{_PREFIX}str"):
            node.tag = _TAGGED
        return node


class _Reader:
    """Turns nodes into values and notes lines and problems on the way."""

    def __init__(self, name: str, numbered: bool) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._name, self._numbered = name, numbered

    def read(self, node: yaml.Node, path: Location) -> Any:
        """The value of a node, or ``_WRONG``."""
        self.lines.setdefault(path_text(path), node.start_mark.line + 1)
        if node.tag == _ALIAS:
            return self._note(node, path, f"is the alias {shown(node.value)}, but aliases are not taken: write it out.")
        if node.tag == _TAGGED:
            return self._note(
                node, path, "has a tag (a word after '!'), but tags are not taken: write the value alone."
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            values = [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
            return _WRONG if _WRONG in values else values
        assert isinstance(node, yaml.ScalarNode)
        value = read_scalar(node.value, node.tag.removeprefix(_PREFIX), plain=node.style is None)
        return self._note(node, path, value.sentence) if isinstance(value, Unclear) else value

    def _mapping(self, node: yaml.MappingNode, path: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            line = key_node.start_mark.line + 1
            twice = key in first
            if twice:
                place = f"in line {first[key]}" if first[key] != line else "in the same line"
                self._note(key_node, (*path, key), f"is given twice, first {place}: keep one of them.")
            first.setdefault(key, line)
            self.lines.setdefault(path_text((*path, key)), line)
            self._keep(values, key, self.read(value_node, (*path, key)), twice)
        return values

    def _keep(self, values: dict[str, Any], key: str, value: Any, twice: bool) -> None:
        """Put a value in its place; of a section that is given twice, both parts are looked at further."""
        if twice and isinstance(value, dict) and isinstance(values.get(key), dict):
            values[key] = {**value, **values[key]}
        elif value is not _WRONG and not twice:
            values[key] = value

    def _key(self, node: yaml.Node, path: Location) -> str | None:
        """The text of a name as written: ``on`` and ``1`` are names like any other here."""
        if isinstance(node, yaml.ScalarNode) and node.tag not in (_ALIAS, _TAGGED, f"{_PREFIX}merge"):
            return str(node.value)
        what, remedy = "a list or mapping", "write the name alone"
        if isinstance(node, yaml.ScalarNode):
            what = shown(node.value)
            remedy = "write out what it stands for" if node.tag != _TAGGED else "leave out the tag"
        self._note(node, path, f"has {what} where the name of an option must stand: {remedy}.")
        return None

    def _note(self, node: yaml.Node, path: Location, sentence: str) -> Any:
        self.problems.append(Problem(path_text(path), sentence, self._where(node.start_mark.line + 1)))
        return _WRONG

    def _where(self, line: int, column: int | None = None) -> str:
        if not self._numbered:
            return self._name
        return f"{self._name}:{line}" + ("" if column is None else f":{column}")

    def note_syntax(self, error: yaml.YAMLError, text: str, path: Location) -> None:
        """Note why a text is no YAML, with its line and column."""
        sentence, line, column = f"{error}", 1, 1
        if isinstance(error, yaml.reader.ReaderError):
            line = text.count("\n", 0, error.position) + 1
            column = error.position - text.rfind("\n", 0, error.position)
            sentence = f"the character {ord(chr(error.character)):#x} is not allowed: remove it"
        elif isinstance(error, yaml.MarkedYAMLError):
            at_end = "end of stream" in f"{error.problem}"  # what was left open says more than where it was missed
            mark = error.context_mark if at_end and error.context_mark else error.problem_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            sentence = ", ".join(filter(None, (error.context, error.problem, error.note))) + _remedy(error)
        full = f"cannot be read as YAML: {sentence}."
        self.problems.append(Problem(path_text(path) if path else "", full, self._where(line, column)))


def _remedy(error: yaml.MarkedYAMLError) -> str:
    """What most likely went wrong, from the parser's words."""
    remedies = (
        ("'\\t'", "indent with spaces, not tabs"),
        ("mapping values are not allowed", "look for a line without its colon, or indented too far"),
        ("expected <block end>", "indent the options of a section alike, one a line"),
        ("could not find expected ':'", "write a colon and a space after each name"),
        ("that cannot start any token", "put text with special characters in quotes"),
        ("expected ',' or", "close the bracket, or put commas between"),
        ("<stream end>", "close the quote or bracket that is open"),
        ("end of stream", "close the quote or bracket that opens here"),
        ("another document", "remove what follows the second '---'"),
        ("nested more", "sections hold options, and options hold values or one list"),
    )
    return next((f": {remedy}" for words, remedy in remedies if words in f"{error.problem}"), "")
