"""The built-in configurations, one hydra group a folder; this file lets hydra find them as pkg://agent_rl.configs."""
