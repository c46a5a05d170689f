"""Environments of other packages, a file for each; the registry finds them by their namespace."""
