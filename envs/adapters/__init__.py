"""Environments of other packages and protocols, a file for each; the registry finds packages by their namespace."""
