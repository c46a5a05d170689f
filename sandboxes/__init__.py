"""Where model-written code runs: one interface (`base`), several backends (`backends` lists them)."""
