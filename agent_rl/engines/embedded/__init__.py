"""The embedded engine: continuous batching of a torch model, on a CPU or one GPU."""
