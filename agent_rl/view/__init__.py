"""Episodes to look at: as text in a terminal, as one HTML page, as a learning curve."""
