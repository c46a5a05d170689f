"""Mixture of experts: routes recorded and replayed, their agreement, and the balance of the experts."""
