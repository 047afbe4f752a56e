"""Penstock inside vLLM: one connector made of a scheduler half and a worker half.

The scheduler half (:mod:`penstock.vllm.scheduler`) decides; the worker half
(:mod:`penstock.vllm.worker`) submits to the native engine and reports. What passes between
them is in :mod:`penstock.vllm.messages`. Every use of a private vLLM name is in
:mod:`penstock.vllm.compat`.
"""
