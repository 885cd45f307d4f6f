"""``fedmoe report``: the results of finished and running runs as one HTML page, Markdown tables and pictures."""
