"""Every architecture of vLLM's registry, tiny and with random weights: does Penstock serve it?"""
