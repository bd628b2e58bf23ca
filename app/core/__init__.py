"""Decisions without I/O: no asyncio, no device, no socket is imported below this package."""
