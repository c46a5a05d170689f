"""Environments on another machine: the server and its clients."""
