"""Backends: where a policy is trained."""
