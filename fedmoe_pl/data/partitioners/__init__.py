"""Who holds which samples."""
