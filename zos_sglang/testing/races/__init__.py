"""Races between streams and the host: a detector on a logical clock, and a device that really runs late."""
