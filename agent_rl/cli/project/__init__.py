"""`agent-rl init`: a project of a user's own, from the templates in this folder."""
