"""What a run shows: loggers, tables and progress."""
