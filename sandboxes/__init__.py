"""Where model-written code runs. Nothing is here yet: no built-in tool executes code so far."""
