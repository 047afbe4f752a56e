"""Penstock inside vLLM: one connector, made of a scheduler half and a worker half.

The scheduler half (:mod:`penstock.vllm.scheduler`) decides. The worker half
(:mod:`penstock.vllm.worker`) submits jobs to the native engine and reports. The messages between
them are in :mod:`penstock.vllm.messages`. Every use of a private vLLM name is in
:mod:`penstock.vllm.compat`.
"""
