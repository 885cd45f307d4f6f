"""Secure aggregation between machines: its protocol, and what clients and server say to each other in a round."""
