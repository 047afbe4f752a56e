"""The store is in the library beside this file."""
