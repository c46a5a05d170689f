"""The built-in environments, one file each; the registry finds them by this package's path."""
