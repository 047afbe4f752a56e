"""How the site's API pages read docstrings."""

from __future__ import annotations

from typing import Any

from griffe import Extension
from scripts.docs.markup import examples, roles


class Markdown(Extension):  # type: ignore[misc]
    """Makes Markdown of every docstring before it is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = examples(roles(obj.docstring.value))
