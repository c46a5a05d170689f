"""Files of settings: a name and a value a line, as shells have them."""

from envfile.reading import read
from envfile.writing import write

__all__ = ["read", "write"]
