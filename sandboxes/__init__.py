"""Where model-written code runs: one interface (`base`), several backends (`registry` lists them)."""
