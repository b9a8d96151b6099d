"""Stands in for the package `mooncake` where its wheel cannot be used: memory moved over TCP, see `engine`."""
