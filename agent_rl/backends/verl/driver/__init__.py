"""The driver: the one process of a run on verl that decides; it holds no weights."""
