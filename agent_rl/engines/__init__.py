"""Engines: token ids in, sampled token ids out."""
