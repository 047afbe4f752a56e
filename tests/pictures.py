"""What may not happen in a picture: text that is cut off, or crosses something.

Widths are those of DejaVu Sans, the widest of the fonts that people commonly see.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

from penstock.axis import text_width

_ABOVE, _BELOW = 0.74, 0.22
"""How far letters reach over and under the line that they stand on, in text of size 1."""


@dataclass(frozen=True)
class Box:
    """A mark and the room that it takes."""

    what: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )


def faults(picture: str, style: str = "") -> list[str]:
    """What is wrong with an SVG picture, in words; `style` is that of the page it stands in."""
    root = ElementTree.fromstring(picture)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    frame = Box("the picture", left, top, left + width, top + height)
    style += "".join(each.text or "" for each in root.iter() if _name(each) == "style")
    texts = [_text(each, root, style) for each in root.iter() if _name(each) == "text"]
    found = [f"{text.what} reaches beyond the picture" for text in texts if not frame.holds(text)]
    found += [f"{a.what} and {b.what}" for a, b in combinations(texts, 2) if a.meets(b)]
    for mark in root.iter():
        if _name(mark) == "circle":
            x, y, r = (float(mark.attrib[name]) for name in ("cx", "cy", "r"))
            dot = Box("a dot", x - r, y - r, x + r, y + r)
            found += [f"{text.what} and a dot" for text in texts if text.meets(dot)]
        if _name(mark) == "rect" and "%" not in mark.attrib["width"]:
            box = _rect(mark)
            found += [
                f"{text.what} crosses the edge of a box"
                for text in texts
                if text.meets(box) and not box.holds(text)
            ]
    return found


def words(picture: str) -> list[str]:
    """The picture's texts."""
    return [_said(each) for each in ElementTree.fromstring(picture).iter() if _name(each) == "text"]


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _said(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def _text(element: ElementTree.Element, root: ElementTree.Element, style: str) -> Box:
    said, kind = _said(element), element.get("class", "")
    size = float(root.get("font-size", 16))
    bold = element.get("font-weight") == "600"
    for selector, rule in re.findall(r"([^{}]+)\{([^{}]*)\}", style):
        if selector.split()[-1] in ("text", f".{kind}", f"text.{kind}"):
            if given := re.search(r"font(?:-size)?:\s*(\d+)px", rule):
                size = float(given[1])
            bold = bold or "font-weight:600" in rule
    x, y = (float(element.attrib[name]) for name in ("x", "y"))
    width = text_width(said, size, bold=bold)
    left = x - width * {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor", "start")]
    return Box(repr(said), left, y - _ABOVE * size, left + width, y + _BELOW * size)


def _rect(element: ElementTree.Element) -> Box:
    x, y, width, height = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
    return Box("a box", x, y, x + width, y + height)
