"""Gym: what an environment author writes. Environments, tools, rewards, tasks, budgets and their registry."""
