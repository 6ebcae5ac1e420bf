"""Benchmarks: fly-jax bench ..."""
