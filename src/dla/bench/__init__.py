"""Benchmarks, and the streams they run on."""
