"""How the site's API pages read docstrings."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

from griffe import Docstring, Extension

from penstock import _native
from scripts.docs.markup import examples, roles

_NATIVE = "penstock._native."


class Markdown(Extension):  # type: ignore[misc]
    """Makes Markdown of every docstring before it is read. Those of the native module come from the
    module itself: its stubs have none."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is None and obj.path.startswith(_NATIVE):
            text = inspect.getdoc(_native_object(obj.path))
            obj.docstring = Docstring(text, parent=obj) if text else None
        if obj.docstring is not None:
            obj.docstring.value = examples(roles(obj.docstring.value))


def _native_object(path: str) -> object:
    try:
        return attrgetter(path.removeprefix(_NATIVE))(_native)
    except AttributeError:
        # A name for types only.
        return None
