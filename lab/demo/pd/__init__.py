"""The demo with `--pd`: a prefill and a decode server, against two servers behind round-robin."""
