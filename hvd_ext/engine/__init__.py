"""The only door to the native engine: its C functions, its libraries, and the versions that it works with."""
