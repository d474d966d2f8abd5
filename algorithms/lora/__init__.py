"""Adapters of low rank on a frozen base, which may be quantised."""
