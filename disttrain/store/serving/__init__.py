"""The store's server: a process of its own, on libuv."""
