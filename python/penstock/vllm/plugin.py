"""The plugin that vLLM runs in each of its processes, from the entry point `vllm.general_plugins`.

An engine asks for Penstock by naming it as its connector, or by a `penstock.` key in its
`additional_config`. For any other engine the plugin changes nothing.
"""

from __future__ import annotations

import logging

from penstock.errors import ConfigError

logger = logging.getLogger("vllm.penstock")


def register() -> None:
    """Installs Penstock's additions to vLLM in this process."""
    from penstock.vllm import compat, layouts, memory, model_share

    try:
        compat.check_version()
    except ConfigError as error:
        # In an engine with Penstock's connector, the connector refuses, in the same words.
        logger.debug("Penstock: plugin not loaded: %s", error)
        return
    compat.register_connector()
    compat.require_embeddings()
    compat.drop_wrong_params()
    layouts.install()
    memory.install()
    model_share.install()
