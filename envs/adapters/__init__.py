"""Adapters: environments of other libraries and protocols, one file each, imported when one of theirs is asked for."""
