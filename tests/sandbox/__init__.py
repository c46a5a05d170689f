"""Tests of the sandboxes: one contract and one list of attacks for every backend."""
