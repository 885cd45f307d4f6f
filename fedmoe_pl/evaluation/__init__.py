"""Evaluates the models of clients: accuracies, other metrics, gate weights, and what training costs."""
