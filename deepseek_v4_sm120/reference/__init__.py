"""Slow, plain torch, written from the specification and never from a kernel. Needs no extension."""
