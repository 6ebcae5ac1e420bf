"""Bridges to other frameworks."""
