"""Stands in for the package `mooncake`, whose wheel needs libibverbs: memory moved over TCP, see `engine`."""
