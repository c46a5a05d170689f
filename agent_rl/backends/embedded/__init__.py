"""The embedded backend: a small model, made, warmed up, sampled from and trained in this process."""
