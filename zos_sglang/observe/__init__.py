"""Looking at a running scheduler."""
