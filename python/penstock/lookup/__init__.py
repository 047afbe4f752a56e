"""How many tokens of a prompt an engine would find in a pool, for routers.

No engine is asked. Prompts are hashed here as vLLM hashes them, and the pools' own descriptions of
namespaces tell how. ``penstock lookup-server`` serves the same over HTTP.
"""

from penstock.lookup.engines import EngineAddress
from penstock.lookup.models import Lora, Model, Refused
from penstock.lookup.service import Found, InPool, OnEngine, Question, Service, open

__all__ = [
    "EngineAddress",
    "Found",
    "InPool",
    "Lora",
    "Model",
    "OnEngine",
    "Question",
    "Refused",
    "Service",
    "open",
]
