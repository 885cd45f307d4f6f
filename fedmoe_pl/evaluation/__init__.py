"""Evaluates the clients' models (accuracies, other metrics and gate weights), and counts the operations of training."""
