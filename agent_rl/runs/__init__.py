"""Runs: what a training run has on either backend. Its settings, folder, metrics, report and stored groups."""
