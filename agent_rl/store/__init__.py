"""Episodes on disk: one JSON line each, appended whole, healed after a crash."""
