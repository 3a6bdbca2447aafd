"""Loads a server and tells what came of it."""
