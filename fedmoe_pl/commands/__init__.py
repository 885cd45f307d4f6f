"""What the commands do beside fit: audit, export, personalize and predict."""
