"""A soak: one real server under a seeded mixture of load and disturbance, every answer judged."""
