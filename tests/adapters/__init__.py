"""Tests of the adapters, each beside the package that it adapts."""
