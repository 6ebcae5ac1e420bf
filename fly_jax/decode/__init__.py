"""Decoding loops around fly_verify: model, drafters, generate."""
