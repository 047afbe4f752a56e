"""What vLLM runs in each of its processes, found through the entry point `vllm.general_plugins`.

It changes nothing for an engine that does not ask for it, by having Penstock as its connector or by
a `penstock.` key in its `additional_config`.
"""

from __future__ import annotations

import logging

from penstock.errors import ConfigError

logger = logging.getLogger("vllm.penstock")


def register() -> None:
    """Offers this process what Penstock adds to vLLM."""
    from penstock.vllm import compat, layouts, memory

    try:
        compat.check_version()
    except ConfigError as error:
        # An engine with Penstock's connector is refused by the connector, in the same words.
        logger.debug("Penstock: plugin not loaded: %s", error)
        return
    layouts.install()
    memory.install()
