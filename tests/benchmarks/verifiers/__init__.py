"""Verifiers for the benchmark of audits: ten with a planted hole, twenty honest ones."""
