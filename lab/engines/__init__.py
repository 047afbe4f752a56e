"""vLLM engines in processes of their own, told what to do by tests and benches."""
