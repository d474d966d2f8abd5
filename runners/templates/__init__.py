"""Adapt messages to what chat templates render."""
