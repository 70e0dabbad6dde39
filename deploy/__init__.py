"""The demo and what runs the service elsewhere."""
