"""Environments on another machine: a server that plays them, and the client that makes one of its address."""
