"""Names that users write to configure the connector. Needs neither vLLM nor its dependencies."""

PREFIX = "penstock."
"""Every setting is a key ``penstock.<name>`` of vLLM's ``kv_connector_extra_config``."""

POOL_VARIABLE = "PENSTOCK_POOL"
"""Environment variable with the pool's URL, for use if the settings name none. So a URL with a
password stays out of command lines."""
