"""Places on another machine that clients lease: what servers of environments and of sandboxes have in common."""
