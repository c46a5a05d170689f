"""The built-in tools, one file each; an environment lists the ones it uses in `extra_tools`."""
