"""Our settings as verl's config, checked before a run starts."""
