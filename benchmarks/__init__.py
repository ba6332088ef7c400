"""Measures pulse-outbox beside its peers: `python3 dev.py bench --help`. benchmarks/README.md is the map."""
