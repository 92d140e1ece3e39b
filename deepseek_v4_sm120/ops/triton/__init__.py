"""Triton device functions and their launches. No checks and no allocation: ops/ does both."""
