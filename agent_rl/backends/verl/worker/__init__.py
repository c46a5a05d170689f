"""The workers: what runs inside verl's Ray actors, with the weights and the environments."""
