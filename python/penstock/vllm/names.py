"""Names that users write to configure the connector. Needs neither vLLM nor its dependencies."""

import re

PREFIX = "penstock."
"""Every setting is a key ``penstock.<name>`` of vLLM's ``kv_connector_extra_config``."""

TENANT = PREFIX + "tenant"
"""The key of a request's ``kv_transfer_params`` that names its tenant."""

EVENT_KEY_VARIABLE = "PENSTOCK_EVENT_KEY"
"""The environment variable with the key of what KV events show in place of cache salts."""

KEEP, PREFETCH, LET_GO = PREFIX + "keep", PREFIX + "prefetch", PREFIX + "let_go"
"""The keys of a request's hints."""

TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a tenant's name may be."""
