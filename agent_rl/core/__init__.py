"""Core: the nouns that everything else speaks in. Messages, trajectories of token ids, episodes and their groups."""
