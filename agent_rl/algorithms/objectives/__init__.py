"""Objectives: the loss of each sampled token. `base` says what they all take and return."""
