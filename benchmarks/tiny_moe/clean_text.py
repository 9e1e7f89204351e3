"""Plain text from the markups of the packages: HTML, reStructuredText, POD, roff, dictd databases and Sword modules.

Each function takes the bytes of one file and gives a string, or a list of strings where a file holds many documents.
What is dropped: markup, navigation, licence headers in comments, cross-reference braces. Nothing is translated.
"""

import gzip
import html
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

_BLOCK_TAGS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "li", "tr", "dt", "dd", "pre", "br", "blockquote", "title"}
_SILENT_TAGS = {"script", "style", "head", "nav", "footer", "header", "form"}


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.silent = 0
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.silent += tag in _SILENT_TAGS
        self.preformatted += tag == "pre"
        if tag in _BLOCK_TAGS:
            self.pieces.append("\n" if tag in ("br", "li", "tr") else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in _SILENT_TAGS
        self.preformatted -= tag == "pre"
        if tag in _BLOCK_TAGS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.pieces.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def tidy(text: str) -> str:
    """Straight quotes, no trailing blanks, at most one empty line in a row, no control characters."""
    for curly, straight in {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "\u00a0": " "}.items():
        text = text.replace(curly, straight)
    text = re.sub(r"[^\n\t\x20-\x7e\u00a1-\u024f]", "", text.replace("\r", ""))
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def from_html(data: bytes) -> str:
    parser = _Text()
    parser.feed(data.decode("utf-8", "replace"))
    lines = [line if "    " in line else line.strip() for line in "".join(parser.pieces).split("\n")]
    return tidy("\n".join(lines))


def from_rst(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    text = re.sub(
        r"(?m)^\.\. (SPDX|_|index|highlight|currentmodule|include|toctree|sectionauthor|moduleauthor).*\n", "", text
    )
    text = re.sub(r":[a-zA-Z:+.-]+:`!?~?\.?([^`<]+?)(\s*<[^`]*>)?`", r"\1", text)  # :func:`name` -> name
    text = re.sub(r"``([^`]+)``", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_+", r"\1", text)
    text = re.sub(r"(?m)^([=~^*#\"'+-])\1{3,}$", lambda line: line.group(1) * 4, text)
    return tidy(text)


def from_pod(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    text = text[text.find("\n=") :] if "\n=" in text else text
    text = re.sub(r"(?m)^=(begin|for|encoding|cut|pod|over|back|end|X).*\n", "", text)
    text = re.sub(r"(?m)^=(head\d|item)\s*\*?\s*", "", text)
    for _ in range(3):  # nested codes, inner ones first
        text = re.sub(r"[BCFI]<<+ (.*?) >+>", r"\1", text)
        text = re.sub(r"[XZ]<[^<>]*>", "", text)
        text = re.sub(r"L<(?:[^<>|]*\|)?/?([^<>]*)>", r"\1", text)
        text = re.sub(r"[BCFIS]<([^<>]*)>", r"\1", text)
    text = text.replace("E<gt>", ">").replace("E<lt>", "<")
    return tidy(text)


def from_roff(data: bytes) -> str:
    """A manual page: sections and paragraphs of its macros, fonts dropped."""
    out: list[str] = []
    filled = True
    for line in data.decode("utf-8", "replace").split("\n"):
        if line.startswith((r".\"", r"'\"", ".so", ".ad", ".hy", ".na")):
            continue
        if line.startswith("."):
            macro, _, rest = line[1:].partition(" ")
            rest = re.sub(r'"', "", rest) if macro in ("SH", "SS", "TH", "B", "I", "TP", "IP") else rest
            if macro in ("nf", "EX", "fi", "EE"):
                filled = macro in ("fi", "EE")
                out.append("\n")
            elif macro in ("SH", "SS"):
                out.append(f"\n\n{rest}\n")
            elif macro in ("PP", "P", "LP", "TP", "IP", "HP", "TQ"):
                out.append(f"\n\n{rest.split(' ')[0] if macro == 'IP' else ''} ")
            elif macro in ("BR", "RB", "IR", "RI", "BI", "IB"):
                out.append("".join(re.findall(r'"[^"]*"|\S+', rest)).replace('"', "") + (" " if filled else "\n"))
            elif macro in ("B", "I", "SM", "SB"):
                out.append(rest + (" " if filled else "\n"))
            continue
        out.append(line + (" " if filled and line else "\n"))
    text = "".join(out)
    text = re.sub(r"\\f[A-Z]|\\f\(..|\\&|\\c|\\,|\\/|\\:|\\s[+-]?\d", "", text)
    for code, plain in {
        r"\-": "-",
        r"\(aq": "'",
        r"\(dq": '"',
        r"\e": "\\",
        r"\ ": " ",
        r"\~": " ",
        r"\(bu": "*",
    }.items():
        text = text.replace(code, plain)
    text = re.sub(r"\\\(..|\\\[[^\]]*\]|\\\*\S", "", text)
    return tidy(re.sub(r"(?<=\S)  +", " ", re.sub(r"\n +", "\n", text)))


def from_dictd(data: bytes) -> list[str]:
    """Documents of some 8,000 characters of neighbouring entries, their lines joined into paragraphs."""
    text = data.decode("utf-8", "replace")
    text = text[text.find("\n\n", 4000) :]  # what describes the database comes first
    text = re.sub(
        r"\[(1913 Webster|PJC|WordNet 1.5|Webster 1913 Suppl\.|[^\]]{0,20}PJC[^\]]{0,20})\]|[{}]|\\[^\\\n]{0,60}\\",
        "",
        text,
    )
    text = re.sub(r"\n\s+\(\d{4}-\d\d-\d\d\)\n", "\n", text)  # dates of the last change
    paragraphs = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        lines = paragraph.strip("\n").split("\n")
        indented = [line.strip() for line in lines if line[:1] in " \t"]
        heads = [line.strip() for line in lines if line[:1] not in " \t"]
        joined = "\n".join(heads + ([re.sub(r"\s+", " ", " ".join(indented))] if indented else []))
        if joined.strip():
            paragraphs.append(("\n" if heads else "") + joined)
    documents, held = [], ""
    for paragraph in paragraphs:
        held += paragraph + "\n"
        if len(held) > 8000:
            documents.append(tidy(held))
            held = ""
    return documents


def from_sword(index: bytes, blocks: bytes) -> list[str]:
    """The books of a Sword zText module: zlib blocks of OSIS text."""
    books = []
    for offset, nbytes, _ in struct.iter_unpack("<III", index):
        if nbytes:
            text = zlib.decompress(blocks[offset : offset + nbytes]).decode("utf-8", "replace")
            text = re.sub(r"<note.*?</note>|<title.*?</title>", "", text, flags=re.S)
            text = re.sub(r"<chapter|<div [^>]*type=\"x-p\"", "\n\n\\g<0>", text)
            text = html.unescape(re.sub(r"<[^>]*>", "", text))
            books.append(tidy(re.sub(r"[ \t]+", " ", text)))
    return books
