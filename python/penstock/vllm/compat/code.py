"""The code that computes a model and is not vLLM's."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_NOT_OWN = {"vllm", "torch", "transformers", *sys.stdlib_module_names}
_REMOTE = "transformers_modules"
"""The package that transformers makes of a model's own code. Its folders are named by where the
model lies, and by its commit."""

_HELPERS = ("quant_method", "scheme", "impl")
"""What a part of a model hands its computation to."""


def own_code(model: Any) -> dict[str, str]:
    """Name → file of each module of Python with a part of the model that is not vLLM's, and of the
    modules of the same package that these use."""
    kinds = {
        kind
        for part in model.modules()
        for each in (part, *(getattr(part, name, None) for name in _HELPERS))
        for kind in type(each).__mro__
    }
    left = [kind.__module__ for kind in kinds if _package(kind.__module__) not in _NOT_OWN]
    found: dict[str, str] = {}
    seen = set(left)
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None:
            continue
        found[_told_name(name)] = file
        for other in {*_owners(module), *_imported(module, Path(file))}:
            if other not in seen and _package(other) == _package(name):
                seen.add(other)
                left.append(other)
    return dict(sorted(found.items()))


def _owners(module: ModuleType) -> Iterator[str]:
    """The modules that a module's values come from, as far as they tell. A package has all that
    anybody has loaded of it, so it is not followed by itself."""
    for value in vars(module).values():
        if not isinstance(value, ModuleType):
            yield _module_of(value)
        elif not hasattr(value, "__path__"):
            yield value.__name__


def _imported(module: ModuleType, file: Path) -> Iterator[str]:
    """The modules that a module's text imports from. Numbers and text that it gets there do not
    tell where they come from."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = module.__package__ or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _module_of(value: Any) -> str:
    name = getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _told_name(module: str) -> str:
    return module.rpartition(".")[2] if _package(module) == _REMOTE else module
