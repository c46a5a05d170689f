"""Checks: what is wrong with an environment, found without a model; what policies without skill score in it."""
