"""Traces of verifications: recorded on the device, written whole, replayed under any setting."""
