"""What users write to set the connector. Known without vLLM, and without what it brings."""

PREFIX = "penstock."
"""Every setting is a key ``penstock.<name>`` of vLLM's ``kv_connector_extra_config``."""

POOL_VARIABLE = "PENSTOCK_POOL"
"""Environment variable that names the pool when the settings do not: a URL with a password
stays out of command lines this way."""
