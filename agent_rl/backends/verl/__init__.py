"""The verl backend: the same environments and algorithms on Ray, with vLLM; the only place that imports verl."""
