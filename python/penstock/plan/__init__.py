"""Plans of KV memory over the ranks of a pipeline. Needs neither torch nor vLLM."""
