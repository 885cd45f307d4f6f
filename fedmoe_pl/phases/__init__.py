"""What a phase is: its settings, where it starts from, and which clients take part."""
