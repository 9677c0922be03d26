"""How a server process starts and ends."""
