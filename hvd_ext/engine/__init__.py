"""The only door to the native engine: its C functions, its libraries, what it is told about."""
